#!/bin/sh
echo stopped
