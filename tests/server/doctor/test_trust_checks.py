"""`kvtier doctor`: certificates, tokens and tier classes that would stop a server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.certificates import Authority, Pair
from harness.command_line import json_output, kvtier

from kvtier.protos.endpoint import parse_endpoint
from kvtier.server.auth.authenticator import AccessControl, AccessError
from kvtier.server.auth.tokens import format_entry, token_hash
from kvtier.server.config.peers import PeersConfig
from kvtier.server.config.schema import AuthConfig, Config, TierConfig, TlsConfig
from kvtier.server.doctor.finding import CheckContext, CheckResult, Verdict
from kvtier.server.doctor.server_checks import tiers
from kvtier.server.doctor.trust_checks import trust

LONG = (-1, 100)
TOKEN = format_entry("me", token_hash("t"), "acme", ["engine"], shared_memory=False)


def config_of(pair: Pair | None = None, ca: str | None = None, tokens: Path | None = None, **more: object) -> Config:
    tls = TlsConfig(
        cert=Path(pair.cert) if pair else None, key=Path(pair.key) if pair else None, client_ca=Path(ca) if ca else None
    )
    default = {"listen": ("unix:/nowhere",), "region_size": 1 << 26, "data_dir": Path("/nowhere")}
    return Config(**default | more, tls=tls, auth=AuthConfig(tokens=tokens))  # type: ignore[arg-type]


def context_of(config: Config | None) -> CheckContext:
    """Returns the input of the checks, without a server."""
    return CheckContext(
        config=config,
        problems=(),
        warnings=(),
        endpoint=parse_endpoint("unix:/nowhere"),
        status=None,
        error="",
        reason="",
        protocol_versions=(),
        server_version="",
        environ={},
    )


def found(*verdicts: str, of: list[CheckResult]) -> list[CheckResult]:
    """Checks the verdicts of these findings; returns them.

    All but ok ones need a reason and advice.
    """
    assert [each.verdict.value for each in of] == list(verdicts), of
    assert all(bool(each.why) == bool(each.do) == (each.verdict is not Verdict.OK) for each in of)
    return of


def private(pair: Pair) -> Pair:
    """Returns a pair whose key only the owner can read."""
    Path(pair.key).chmod(0o600)
    Path(pair.cert).chmod(0o644)
    return pair


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Returns an authority whose certificate is valid for long."""
    made = Authority(tmp_path, days=LONG)
    Path(made.ca).chmod(0o644)
    return made


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Returns a file with one token."""
    path = tmp_path / "tokens.toml"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


class TestTrust:
    def test_without_tls_and_tokens(self) -> None:
        """There is one finding, and none if the configuration is invalid.

        Another check reports that.
        """
        [finding] = found("ok", of=list(trust(context_of(config_of()))))
        assert finding.seen == "neither TLS nor tokens are configured"
        assert list(trust(context_of(None))) == []

    def test_sound_files(self, authority: Authority, tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Each file has a finding with its validity or number of entries; nothing is logged."""
        pair = private(authority.issue("server", days=LONG))
        config = config_of(pair, authority.ca, tokens)
        cert, ca, directory = found("ok", "ok", "ok", of=list(trust(context_of(config))))
        assert f"{pair.cert} and its key can be used for 99 d" in cert.seen
        assert f"{authority.ca}: the client CAs can be used for 99 d" in ca.seen
        assert directory.seen == f"{tokens}: tokens: 1, certificates: 0, expired: 0"
        assert caplog.messages == []

    @pytest.mark.parametrize(
        ("days", "verdict", "seen"),
        [
            ((-2, -1), "fail", "certificate has expired"),
            ((1, 2), "fail", "certificate is not yet valid"),
            ((-1, 13), "warn", "expires in 12 d 23 h"),
            ((-1, 15), "ok", "can be used for 14 d 23 h"),
        ],
    )
    def test_dates_of_the_certificate(
        self,
        authority: Authority,
        caplog: pytest.LogCaptureFixture,
        days: tuple[float, float],
        verdict: str,
        seen: str,
    ) -> None:
        """An expired certificate stops clients but not the server.

        No warning is logged a second time.
        """
        pair = private(authority.issue("server", days=days))
        [finding] = found(verdict, of=list(trust(context_of(config_of(pair)))))
        assert seen in finding.seen
        assert pair.cert in finding.seen
        assert ("replace the file" in finding.do) is (verdict != "ok")
        assert caplog.messages == []

    @pytest.mark.parametrize(
        ("days", "verdict", "seen"),
        [
            ((-2, -1), "fail", "all client CAs have expired"),
            ((-1, 3), "warn", "the last client CA expires in 2 d 23 h"),
        ],
    )
    def test_dates_of_the_authorities_of_clients(
        self, tmp_path: Path, authority: Authority, days: tuple[float, float], verdict: str, seen: str
    ) -> None:
        """The last expiry counts: an old authority beside its successor is normal."""
        pair, old = private(authority.issue("server", days=LONG)), Path(Authority(tmp_path, "old", days=days).ca)
        _, finding = found("ok", verdict, of=list(trust(context_of(config_of(pair, str(old))))))
        assert seen in finding.seen
        old.write_text(old.read_text() + Path(authority.ca).read_text())
        found("ok", "ok", of=list(trust(context_of(config_of(pair, str(old))))))

    @pytest.mark.parametrize(
        ("spoil", "seen"),
        [
            (lambda pair, _: Path(pair.cert).unlink(), "server.pem: No such file or directory"),
            (lambda pair, _: Path(pair.key).unlink(), "server.key: No such file or directory"),
            (lambda pair, _: Path(pair.cert).write_text("junk"), "no certificates in PEM"),
            (lambda pair, other: Path(pair.key).write_text(Path(other.key).read_text()), "KEY_VALUES_MISMATCH"),
        ],
    )
    def test_unusable_tls_files(self, authority: Authority, spoil: Callable[[Pair, Pair], object], seen: str) -> None:
        """The text is that of the server, which refuses to start."""
        pair = private(authority.issue("server", days=LONG))
        spoil(pair, authority.issue("other"))
        config = config_of(pair, authority.ca)
        [finding] = found("fail", of=list(trust(context_of(config))))
        with pytest.raises(AccessError) as refused:
            AccessControl(config)
        assert finding.seen == str(refused.value)
        assert seen in finding.seen
        assert finding.why.startswith("the server does not start")

    def test_an_unusable_authority(self, tmp_path: Path, authority: Authority) -> None:
        """The finding names the right one of the three files."""
        (tmp_path / "junk.pem").write_text("junk")
        pair = private(authority.issue("server"))
        [finding] = found("fail", of=list(trust(context_of(config_of(pair, f"{tmp_path}/junk.pem")))))
        assert finding.seen.startswith(f"TLS with {tmp_path}/junk.pem: ")

    def test_files_with_unsafe_permissions(self, authority: Authority, tokens: Path) -> None:
        """Each finding has a command as its remedy.

        Certificates and hashes of tokens are not secret.
        """
        pair = private(authority.issue("server", days=LONG))
        config = config_of(pair, authority.ca, tokens)
        Path(pair.key).chmod(0o640)  # readable for a group that may have it
        tokens.chmod(0o644)
        found("ok", "ok", "ok", of=list(trust(context_of(config))))
        for path in (pair.cert, pair.key, authority.ca, tokens):
            Path(path).chmod(0o666)
        findings = found(*["fail"] * 4, "warn", of=list(trust(context_of(config))))
        writable = (pair.cert, pair.key, authority.ca, tokens)
        assert [each.do for each in findings[:4]] == [f"chmod go-w {path}" for path in writable]
        assert "every user can read the secret" in findings[4].seen
        assert findings[4].do.startswith(f"chmod o-rwx {pair.key} ")

    @pytest.mark.parametrize(
        ("text", "seen"),
        [
            (None, "cannot be read: No such file or directory"),
            ("[[tokens]]\nname = 7\n", "tokens, number 1: name: expected `string`, got `integer`"),
            ("[[tokens]", "Expected ']]'"),
            (TOKEN + TOKEN, "is listed twice"),
        ],
    )
    def test_an_unusable_token_file(self, tokens: Path, text: str | None, seen: str) -> None:
        """The text is that of the server."""
        tokens.unlink()
        if text is not None:
            tokens.write_text(text)
            tokens.chmod(0o600)
        config = config_of(tokens=tokens)
        [finding] = found("fail", of=list(trust(context_of(config))))
        with pytest.raises(AccessError) as refused:
            AccessControl(config)
        assert finding.seen == str(refused.value)
        assert seen in finding.seen

    @pytest.mark.parametrize(
        ("text", "verdict", "seen"),
        [
            ("", "warn", "tokens: 0, certificates: 0, expired: 0"),
            (f"{TOKEN}expires = 2020-01-01T00:00:00Z\n", "warn", "tokens: 1, certificates: 0, expired: 1"),
            (
                f'{TOKEN}expires = 2020-01-01T00:00:00\n[[certificates]]\nname = "cn:c"\nroles = ["admin"]\n',
                "ok",
                "tokens: 1, certificates: 1, expired: 1",
            ),
        ],
    )
    def test_a_token_file_without_valid_entries(self, tokens: Path, text: str, verdict: str, seen: str) -> None:
        """The file is empty, or all entries have expired."""
        tokens.write_text(text)
        [finding] = found(verdict, of=list(trust(context_of(config_of(tokens=tokens)))))
        assert seen in finding.seen


class TestPeers:
    """The files with which this server identifies itself at the servers of `[peers]`."""

    @staticmethod
    def findings(**settings: object) -> list[CheckResult]:
        peers = PeersConfig(**{"servers": ("b.example:7450",)} | settings)  # type: ignore[arg-type]
        return list(trust(context_of(config_of(peers=peers))))[1:]

    def test_sound_files(self, authority: Authority, tmp_path: Path) -> None:
        """The TLS files have one finding with the first expiry, and the token has one."""
        pair, token = private(authority.issue("a", days=(-1, 50))), tmp_path / "token"
        token.write_text("kvt_secret\n")
        token.chmod(0o600)
        files = {"cert": Path(pair.cert), "key": Path(pair.key), "token_file": token}
        tls, named = found("ok", "ok", of=self.findings(ca=authority.ca, **files))
        assert tls.seen == f"peers: usable for 49 d 23 h: {authority.ca}, {pair.cert}, {pair.key}"
        assert named.seen == f"peers: {token} has a token"
        assert "kvt_secret" not in f"{tls}{named}"

    def test_without_files_or_servers(self) -> None:
        """A system CA is no file. Files that no connection uses are not checked."""
        assert self.findings() == self.findings(ca="system") == self.findings(servers=(), ca="/nowhere") == []

    @pytest.mark.parametrize(
        ("spoil", "seen"),
        [
            (lambda _, ca: Path(ca).unlink(), "peers: ca {ca}: No such file or directory"),
            (lambda _, ca: Path(ca).write_text("junk"), "peers: ca {ca}: the file has no certificate in PEM format"),
            (lambda pair, _: Path(pair.key).unlink(), "peers: key {pair.key}: No such file or directory"),
            (lambda pair, ca: Path(pair.cert).write_text(Path(ca).read_text()), "KEY_VALUES_MISMATCH"),
        ],
    )
    def test_unusable_tls_files(self, authority: Authority, spoil: Callable[[Pair, str], object], seen: str) -> None:
        """The text is that of the log when a load fails. The server itself starts."""
        pair = private(authority.issue("a", days=LONG))
        spoil(pair, authority.ca)
        [finding] = found("fail", of=self.findings(ca=authority.ca, cert=Path(pair.cert), key=Path(pair.key)))
        assert seen.format(pair=pair, ca=authority.ca) in finding.seen
        assert finding.why.startswith("no blocks are loaded from the servers of [peers]")

    @pytest.mark.parametrize(
        ("days", "verdict", "seen"),
        [
            ((-2, -1), "fail", "not valid now"),
            ((1, 2), "fail", "not valid now"),
            ((-1, 3), "warn", "expires in 2 d 23 h"),
        ],
    )
    def test_dates_of_the_own_certificate(
        self, authority: Authority, days: tuple[float, float], verdict: str, seen: str
    ) -> None:
        pair = private(authority.issue("a", days=days))
        [finding] = found(verdict, of=self.findings(cert=Path(pair.cert), key=Path(pair.key)))
        assert seen in finding.seen

    @pytest.mark.parametrize(
        ("days", "verdict", "seen"),
        [((-2, -1), "fail", "not valid now"), ((-1, 3), "warn", "expires in 2 d 23 h")],
    )
    def test_dates_of_the_authorities(self, tmp_path: Path, days: tuple[float, float], verdict: str, seen: str) -> None:
        ca = Path(Authority(tmp_path, "other", days=days).ca)
        ca.chmod(0o644)
        [finding] = found(verdict, of=self.findings(ca=str(ca)))
        assert seen in finding.seen

    @pytest.mark.parametrize(
        ("text", "seen"), [(None, "No such file or directory"), ("", "is not a token"), ("two words", "is not a token")]
    )
    def test_an_unusable_token(self, tmp_path: Path, text: str | None, seen: str) -> None:
        path = tmp_path / "token"
        if text is not None:
            path.write_text(text)
            path.chmod(0o600)
        [finding] = found("fail", of=self.findings(token_file=path))
        assert f"token_file {path}: " in finding.seen
        assert seen in finding.seen

    def test_unsafe_permissions(self, authority: Authority, tmp_path: Path) -> None:
        """Each finding has a command as its remedy. Certificates are not secret."""
        pair, token = private(authority.issue("a", days=LONG)), tmp_path / "token"
        token.write_text("kvt_secret")
        files = {"cert": Path(pair.cert), "key": Path(pair.key), "token_file": token}
        for path in (authority.ca, *files.values()):
            Path(path).chmod(0o666)
        findings = found(*["fail"] * 4, *["warn"] * 2, of=self.findings(ca=authority.ca, **files))
        writable = [f"chmod go-w {path}" for path in (authority.ca, *files.values())]
        assert [each.do for each in findings[:4]] == writable
        assert [each.do.split()[2] for each in findings[4:]] == [pair.key, str(token)]
        for path in (authority.ca, *files.values()):
            Path(path).chmod(0o640)
        found("ok", "ok", of=self.findings(ca=authority.ca, **files))


class TestTiers:
    @pytest.mark.parametrize(
        ("source", "verdict", "seen"),
        [
            ("from harness.bad_tiers import BadTier as Odd", "ok", "tier odd: odd_doctor:Odd can be imported"),
            (None, "fail", "cannot import odd_doctor:Odd: No module named 'odd_doctor'"),
            ("import no_such_module", "fail", "cannot import odd_doctor:Odd: No module named 'no_such_module'"),
            ("Even = 1", "fail", "has no attribute 'Odd'"),
            ("Odd = dict", "fail", "odd_doctor:Odd is not a SecondaryTier"),
            ("raise SystemExit(3)", "fail", "cannot import odd_doctor:Odd: SystemExit: 3"),
            ("1 / 0", "fail", "cannot import odd_doctor:Odd: ZeroDivisionError: division by zero"),
        ],
    )
    def test_tier_classes_are_imported(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        source: str | None,
        verdict: str,
        seen: str,
    ) -> None:
        """Each kind of failed import is named.

        Output of a module is suppressed, and no tier is opened.
        """
        if source is not None:
            (tmp_path / "odd_doctor.py").write_text(f"print('hello')\n{source}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "odd_doctor", raising=False)
        tier = TierConfig(type="odd_doctor:Odd", name="odd", path=tmp_path / "odd", size=1 << 24)
        [finding] = found(verdict, of=list(tiers(context_of(config_of(tiers=(tier,))))))
        assert seen in finding.seen
        assert capsys.readouterr().out == ""
        assert not tier.path.exists()

    def test_a_missing_client_library_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tier `s3` needs an optional package."""
        monkeypatch.setitem(sys.modules, "obstore", None)
        tier = TierConfig(type="s3", name="far", path=Path("/nowhere"), size=1 << 24)
        [finding] = found("fail", of=list(tiers(context_of(config_of(tiers=(tier,))))))
        assert "pip install 'kvtier[s3]'" in finding.seen

    @pytest.mark.parametrize("tier_type", ["valkey", "s3"])
    @pytest.mark.parametrize(("mode", "verdict", "seen"), [(0o600, "ok", "can be used"), (0o644, "fail", "chmod 0600")])
    def test_key_files_are_read(self, tmp_path: Path, mode: int, verdict: str, seen: str, tier_type: str) -> None:
        """The file with the keys of a shared tier must be usable, and closed to other users."""
        keys = tmp_path / "keys.toml"
        keys.write_text(f'[[keys]]\ntenant = "*"\nkey = "{"A" * 43}="\n')
        keys.chmod(mode)
        options = {"encryption_keys": str(keys)}
        tier = TierConfig(type=tier_type, name="far", path=tmp_path, size=1 << 24, options=options)
        results = list(trust(context_of(config_of(tiers=(tier,)))))
        [finding] = [result for result in results if "tier far" in result.seen]
        assert finding.verdict == verdict
        assert seen in finding.seen

    def test_without_tiers(self) -> None:
        """There is one finding, and none if the configuration is invalid."""
        found("ok", of=list(tiers(context_of(config_of()))))
        assert list(tiers(context_of(None))) == []


def test_the_command_prints_a_table_or_json(tmp_path: Path, authority: Authority, tokens: Path) -> None:
    """The exit code is 1, and standard error is empty.

    `kvtier config` accepts the same configuration.
    """
    pair = private(authority.issue("server", days=(-2, -1)))
    config = tmp_path / "kvtier.toml"
    config.write_text(
        f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n[auth]\ntokens = "{tokens}"\n'
        f'[[tiers]]\ntype = "no_such_module:Odd"\npath = "{tmp_path}/odd"\nsize = "16MiB"\n'
    )
    flags = ("--config", str(config), "--region-size", "64MiB")
    only = ("--only", "trust", "--only", "tiers")
    findings = json_output("doctor", *flags, *only, code=1)["findings"]
    verdicts = [(each["check"], each["verdict"]) for each in findings]
    assert verdicts == [("trust", "fail"), ("trust", "ok"), ("tiers", "fail")]
    said = kvtier("doctor", *flags, *only, code=1)
    assert said.stderr == ""
    assert (
        f"fail trust: {pair.cert}: certificate has expired\n     why: every client refuses the certificate\n"
        in said.stdout
    )
    kvtier("config", *flags)
