"""What the host runner raises."""


class MetalHostError(Exception):
    """A kernel that does not compile, or that did what a device does not allow; the text says what and where."""
