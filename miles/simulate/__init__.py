"""The real loop, buffer, selector, router and evaluator in virtual time, over modelled engines and
a modelled trainer.

Nothing here starts a process, reads a clock, or imports torch.
"""
