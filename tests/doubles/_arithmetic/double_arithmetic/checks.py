"""What a CUDA extension checks before it launches."""


def check(right, message):
    """TORCH_CHECK: RuntimeError."""
    if not right:
        raise RuntimeError(message)


def aligned(t, name):
    """What TMA and loads of 128 bits take: a base and outer strides of 16 bytes."""
    outer = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    right = t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in outer)
    check(right, f"{name}: base and strides must be multiples of 16 bytes")


def one_device(*tensors):
    check(len({t.device for t in tensors if t is not None}) == 1, "all tensors must be on one device")
