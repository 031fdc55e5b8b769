"""SGLang's kernels for CUDA, in name only."""

from miles_stand_in import stand_in

stand_in(globals(), "0.0.0")
