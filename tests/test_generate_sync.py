import pytest
from generate_sync import SOURCE, TARGET, generate


def test_generated_client_is_current() -> None:
    """`client/sync.py` is what `client/aio.py` generates now."""
    assert TARGET.read_text() == generate(SOURCE.read_text())


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("\nasync_only = True\n", "'async_only' has no replacement"),
        ("\n# As an asynchronous context manager\n", "expected exactly once"),
    ],
)
def test_source_that_cannot_be_translated_is_refused(planted: str, message: str) -> None:
    """The generator refuses leftovers of asyncio, and ambiguous replacements of sentences."""
    with pytest.raises(SystemExit, match=message):
        generate(SOURCE.read_text() + planted)
