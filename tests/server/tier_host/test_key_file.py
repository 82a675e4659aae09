"""The key file of shared tiers, without a server."""

from __future__ import annotations

import base64
import textwrap
import threading
from pathlib import Path

import pytest

from kvtier.server.auth.credential_files import FileError
from kvtier.server.cli import main
from kvtier.server.config.tenants import tenant_tag
from kvtier.server.tier_host.key_file import KeyFile, read_key_file
from kvtier.tiers.secondary_tier import NamespaceId

FIRST, SECOND, THIRD = bytes(32), bytes(range(32)), b"\xff" * 32


def entry(tenant: str, key: bytes) -> str:
    return f'[[keys]]\ntenant = "{tenant}"\nkey = "{base64.b64encode(key).decode()}"\n'


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    file = path / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def namespace(tenant: str) -> NamespaceId:
    return NamespaceId(tenant_tag(tenant) + bytes(16))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_keys_are_per_tenant(tmp_path: Path, mode: int) -> None:
    """In the order of the file. "*": tenants without keys; "": clients without a tenant."""
    text = entry("acme", FIRST) + entry("*", THIRD) + entry("acme", SECOND) + entry("", SECOND)
    ring = read_key_file(written(tmp_path, text, mode))
    assert ring.keys_of(namespace("acme")) == (FIRST, SECOND)
    assert ring.keys_of(namespace("")) == (SECOND,)
    assert ring.keys_of(namespace("other")) == (THIRD,)


def test_a_tenant_without_a_key_has_none(tmp_path: Path) -> None:
    """Without "*" in the file."""
    ring = read_key_file(written(tmp_path, entry("acme", FIRST)))
    assert ring.keys_of(namespace("other")) == ()


def test_the_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "shared-tiers.md").read_text()
    text = textwrap.dedent(page[page.index("    # kv-keys.toml") :].partition("    ```")[0])
    for key in (FIRST, SECOND, THIRD):
        text = text.replace("…", base64.b64encode(key).decode(), 1)
    ring = read_key_file(written(tmp_path, text))
    assert ring.keys_of(namespace("acme")) == (FIRST, SECOND)
    assert ring.keys_of(namespace("")) == (THIRD,)


SECRET = base64.b64encode(SECOND).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field `keys`"),
        ("keys = []", "has no keys"),
        ("keys = 3", "keys: expected `array`, got `integer`"),
        (f'[[keys]]\nkey = "{SECRET}"', "keys, number 1: missing required field `tenant`"),
        (f'[[keys]]\ntenant = 7\nkey = "{SECRET}"', "keys, number 1: tenant: expected `string`, got `integer`"),
        (f'[[keys]]\ntenant = "a"\nkey = "{SECRET}"\nid = "1"', "unknown field `id`"),
        ('[[keys]]\ntenant = "a"\nkey = "AAAA"', "keys, number 1: key: must be 32 bytes in base64"),
        (f'[[keys]]\ntenant = "a"\nkey = "{SECRET}!"', "keys, number 1: key: must be 32 bytes in base64"),
        ('[[keys]]\ntenant = "a"\nkey = "é"', "keys, number 1: key: must be 32 bytes in base64"),
        (entry("a", FIRST) * 2, "keys, number 2: the tenant has this key already"),
        (f'[[keys]\nkey = "{SECRET}"', "is not TOML"),
        (f'[[keys]]\ntenant = "a"\nkey = "{SECRET}', "is not TOML"),
        ("x" * 5_000_000, "is larger than 4194304 bytes"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names file and entry, has one line, and contains no key."""
    file = written(tmp_path, text)
    with pytest.raises(FileError) as refused:
        read_key_file(file)
    assert f"{refused.value}".startswith(f"{file}: ")
    assert message in f"{refused.value}"
    assert "\n" not in f"{refused.value}"
    assert SECRET not in f"{refused.value}"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666, 0o601])
def test_a_file_of_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(FileError, match=rf"has mode {mode:04o}, .*chmod "):
        read_key_file(written(tmp_path, entry("a", FIRST), mode))


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.toml: cannot be read: No such file"):
        read_key_file(tmp_path / "none.toml")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Within a second, by any thread. If the file cannot be used, the previous keys stay."""
    now = 0.0
    file = written(tmp_path, entry("a", FIRST))
    keys = KeyFile(file, clock=lambda: now)

    def current() -> tuple[bytes, ...]:
        found: list[tuple[bytes, ...]] = []
        thread = threading.Thread(target=lambda: found.append(keys().keys_of(namespace("a"))))
        thread.start()
        thread.join()
        return found[0]

    def replace(text: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(text)
        new.chmod(0o600)
        new.replace(file)

    replace(entry("a", SECOND) + entry("a", FIRST))
    assert current() == (FIRST,)
    now = 1.0
    assert current() == (SECOND, FIRST)
    for broken in ("keys = [", entry("a", FIRST)[:-3]):
        replace(broken)
        now += 1.0
        assert current() == (SECOND, FIRST)
    file.unlink()
    now += 1.0
    assert current() == (SECOND, FIRST)
    written(tmp_path, entry("a", THIRD))
    now += 1.0
    assert current() == (THIRD,)


def test_serve_refuses_an_invalid_key_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 78, and nothing has been started."""
    file = written(tmp_path, entry("a", FIRST), 0o644)
    config = tmp_path / "kvtier.toml"
    config.write_text(
        f'data_dir = "{tmp_path}/data"\n[[tiers]]\ntype = "valkey"\n'
        f'options = {{url = "valkey://127.0.0.1:1", encryption_keys = "{file}"}}\n'
    )
    assert main(["serve", "--config", str(config)]) == 78
    assert f"tier valkey: encryption_keys: {file}: has mode 0644" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
