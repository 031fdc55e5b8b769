"""Tests of extract-emails: the addresses, once each."""

from checking import expect, finish, lines

wanted = ["ada@example.org", "bob.ray+news@mail.example.com", "c_d@sub-1.test.net", "z9@a.io"]
expect("emails.txt", lines("emails.txt"), wanted)
finish()
