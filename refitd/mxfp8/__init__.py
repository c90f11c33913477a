"""MXFP8: its format, its tensors in plans, the buffers of engines that hold it, and conversions into them."""
