import pytest
from generate_sync import CLIENT, CONVERSATIONS, ROOT, TARGETS, generate


@pytest.mark.parametrize("path", TARGETS)
def test_generated_clients_are_current(path: str) -> None:
    """A generated file is what its source generates now."""
    assert (ROOT / TARGETS[path]).read_text() == generate(path, (ROOT / path).read_text())


@pytest.mark.parametrize(
    ("path", "planted", "message"),
    [
        (CLIENT, "\nasync_only = True\n", "'async_only' has no replacement"),
        (CLIENT, "\n# As an asynchronous context manager\n", "expected exactly once"),
        (CONVERSATIONS, "\nAsyncClient\nawaited = 1\n", "'awaited' has no replacement"),
    ],
)
def test_source_that_cannot_be_translated_is_refused(path: str, planted: str, message: str) -> None:
    """The generator refuses leftovers of asyncio, and ambiguous replacements of sentences."""
    with pytest.raises(SystemExit, match=message):
        generate(path, (ROOT / path).read_text() + planted)
