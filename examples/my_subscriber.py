"""A subscriber of one's own: how much of each layer's output is zero.

``trace replay run.zarr --subscriber examples/my_subscriber.py:Sparsity`` asks it of a run that is already over;
``--subscriber examples/my_subscriber.py:Sparsity:threshold=0.01`` with a parameter.
"""

from collections.abc import Iterator

from tracereel import Message, Subscriber, Subscription, derived


class Sparsity(Subscriber):
    """The fraction of elements whose absolute value is at most `threshold`: 0 is dense, 1 is a dead layer."""

    scope = "message"  # it remembers nothing between messages, so `trace batch` may cut a trace anywhere

    def __init__(self, kind: str = "activations", threshold: float = 0.0, tag: str = "default", subsample: int = 1):
        super().__init__(Subscription(kind, tag, subsample), produces=f"{kind}_sparsity")
        self.threshold = threshold

    def compute(self, message: Message) -> Iterator[Message]:
        """Yield the fraction for one layer in one step."""
        small = message.data.abs() <= self.threshold
        yield derived(message, self.produces[0], small.double().mean())
