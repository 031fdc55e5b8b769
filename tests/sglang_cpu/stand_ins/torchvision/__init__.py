"""torchvision, in name only: its wheel would bring a CUDA build of torch."""

from miles_stand_in import stand_in

stand_in(globals(), "0.29.1")
