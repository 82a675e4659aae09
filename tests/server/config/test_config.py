"""The configuration: sources of values, refused values and their error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.server.config import loader, machine, tiers
from kvtier.server.config.fields import SETTINGS
from kvtier.server.config.loader import load
from kvtier.server.config.mooncake import read_mooncake_options
from kvtier.server.config.remote import key_files_of, read_valkey_options
from kvtier.server.config.s3 import read_s3_options
from kvtier.server.config.schema import ConfigError
from kvtier.server.config.units import GIB, MIB

MOONCAKE = '[[tiers]]\ntype = "mooncake"\n[tiers.options]\n'
S3 = '[[tiers]]\ntype = "s3"\n[tiers.options]\n'
VALKEY = '[[tiers]]\ntype = "valkey"\n[tiers.options]\n'
ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_DATA_HOME": "/data"}


def problems(**arguments: Any) -> list[str]:
    """Returns the errors of a configuration, one line each."""
    with pytest.raises(ConfigError) as refused:
        load(**({"environ": ENVIRON} | arguments))
    assert not any("\n" in problem for problem in refused.value.problems)
    return list(refused.value.problems)


class TestSources:
    def test_defaults(self) -> None:
        """By default the socket is the user's, and region and LMDB tier fit the machine."""
        loaded = load(environ=ENVIRON)
        config = loaded.config
        assert config.listen == ("unix:/run/user/7/kvtier/kvtier.sock",)
        assert config.data_dir == Path("/data/kvtier")
        assert 0 < config.region_size <= min(8 * GIB, machine.memory_bytes() // 4)
        assert config.metrics is None
        assert config.keeper is None
        assert (config.leases.default, config.leases.max) == (60.0, 600.0)
        assert (config.limits.max_keys, config.limits.max_key_bytes) == (65536, 80)
        assert [(tier.type, tier.path) for tier in config.tiers] == [("lmdb", Path("/data/kvtier/lmdb"))]
        assert MIB <= config.tiers[0].size <= 16 * GIB
        assert set(loaded.origins) == set(SETTINGS)
        assert set(loaded.origins.values()) == {"default"}
        assert not loaded.warnings

    def test_a_default_may_equal_its_maximum(self, write: Any) -> None:
        loaded = load(file=write('[leases]\ndefault = "5m"\nmax = "5m"\n'), environ=ENVIRON)
        assert (loaded.config.leases.default, loaded.config.leases.max) == (300.0, 300.0)

    def test_default_sizes_ask_only_for_room_that_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A note says which default is smaller than usual, and why."""
        monkeypatch.setattr(loader, "memory_bytes", lambda: 64 * GIB)
        monkeypatch.setattr(loader, "available_bytes", lambda: 3 * GIB)
        monkeypatch.setattr(tiers, "disk_bytes", lambda _: 2 * GIB)
        loaded = load(environ=ENVIRON)
        assert loaded.config.region_size == 1536 * MIB
        assert loaded.config.tiers[0].size == GIB
        assert loaded.notes == (
            "region_size is 1.5 GiB by default, not 8.0 GiB: half of the 3.0 GiB of free memory",
            "tier lmdb: size is 1.0 GiB by default, not 16.0 GiB: half of the free space at /data/kvtier/lmdb",
        )

    def test_default_sizes_of_tiers_share_a_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tiers without `size` promise at most half of the free space of one file system."""
        monkeypatch.setattr(tiers, "disk_bytes", lambda *_: 12 * GIB)
        given = {"tiers": [{"type": "lmdb"}, {"type": "disk", "size": "1GiB"}, {"type": "disk", "name": "second"}]}
        loaded = load(given, environ=ENVIRON)
        assert [tier.size for tier in loaded.config.tiers] == [3 * GIB, GIB, 3 * GIB]
        where = "half of the free space at /data/kvtier/second, shared with /data/kvtier/lmdb"
        assert f"tier second: size is 3.0 GiB by default, not 16.0 GiB: {where}" in loaded.notes

    def test_tiers_on_two_disks_share_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(tiers, "disk_bytes", lambda *_: 12 * GIB)
        given = {"tiers": [{"type": "lmdb", "path": f"{tmp_path}/lmdb"}, {"type": "disk", "path": "/dev/shm/disk"}]}
        if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
            pytest.skip("needs two file systems")
        assert [tier.size for tier in load(given, environ=ENVIRON).config.tiers] == [6 * GIB, 6 * GIB]

    def test_sizes_that_are_set_or_usual_need_no_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loader, "memory_bytes", lambda: 64 * GIB)
        monkeypatch.setattr(loader, "available_bytes", lambda: 3 * GIB)
        monkeypatch.setattr(tiers, "disk_bytes", lambda _: 2 * GIB)
        given = {"region_size": "2GiB", "tiers": [{"type": "disk", "size": "1GiB"}]}
        assert load(given, environ=ENVIRON).notes == ()
        monkeypatch.setattr(loader, "available_bytes", lambda: None)
        monkeypatch.setattr(tiers, "disk_bytes", lambda _: 64 * GIB)
        loaded = load(environ=ENVIRON)
        assert (loaded.config.region_size, loaded.config.tiers[0].size, loaded.notes) == (8 * GIB, 16 * GIB, ())

    def test_later_sources_win(self, write: Any) -> None:
        """A flag overrides the environment, the environment the file, and the file the default."""
        file = write('region_size = "1GiB"\nmetrics = "h:1"\n[log]\nlevel = "error"\n[limits]\nmax_keys = 7')
        loaded = load(
            {"region_size": "3GiB", "log.level": None},
            file=file,
            environ=ENVIRON | {"KVTIER_REGION_SIZE": "2GiB", "KVTIER_LOG_LEVEL": "debug"},
        )
        assert loaded.config.region_size == 3 * GIB
        assert loaded.config.log.level == "debug"
        assert loaded.config.metrics == "h:1"
        assert loaded.config.limits.max_keys == 7
        assert loaded.origins["region_size"] == "--region-size"
        assert loaded.origins["log.level"] == "KVTIER_LOG_LEVEL"
        assert loaded.origins["metrics"] == str(file)
        assert loaded.origins["leases.max"] == "default"

    def test_file_from_the_environment(self, write: Any) -> None:
        """KVTIER_CONFIG names a file; --config overrides it."""
        file = write("[limits]\nmax_keys = 7")
        assert load(environ=ENVIRON | {"KVTIER_CONFIG": str(file)}).config.limits.max_keys == 7
        assert load(file=file, environ=ENVIRON | {"KVTIER_CONFIG": "/nowhere"}).config.limits.max_keys == 7

    def test_every_setting_can_come_from_the_environment(self) -> None:
        """Each kind of value can be given as text."""
        config = load(
            environ=ENVIRON
            | {
                "KVTIER_LISTEN": "unix:/a.sock, 127.0.0.1:7",
                "KVTIER_INSECURE": "yes",
                "KVTIER_LIMITS_MAX_KEYS": "12",
                "KVTIER_LEASES_DEFAULT": "5",
                "KVTIER_DATA_DIR": "/elsewhere",
                "KVTIER_KEEPER": "/run/keeper.sock",
                "KVTIER_METRICS": "OFF",
                "KVTIER_TIERS": '[{type = "lmdb", size = "3GiB", durability = "power"}]',
            }
        ).config
        assert config.listen == ("unix:/a.sock", "127.0.0.1:7")
        assert config.insecure is True
        assert config.limits.max_keys == 12
        assert config.leases.default == 5.0
        assert config.keeper == Path("/run/keeper.sock")
        assert config.metrics is None
        [tier] = config.tiers
        assert (tier.size, tier.durability, tier.path) == (3 * GIB, "power", Path("/elsewhere/lmdb"))

    @pytest.mark.parametrize("text", ["none", "[]"])
    def test_secondary_tiers_can_be_turned_off(self, text: str, write: Any) -> None:
        """By flag, by environment, and by file."""
        assert load({"tiers": ()}, environ=ENVIRON).config.tiers == ()
        assert load(environ=ENVIRON | {"KVTIER_TIERS": text}).config.tiers == ()
        assert load(file=write("tiers = []"), environ=ENVIRON).config.tiers == ()

    def test_an_external_tier_is_named_by_its_class(self, write: Any) -> None:
        """Its options are passed unchanged."""
        file = write('[[tiers]]\ntype = "acme.cache:GlacierTier"\nsize = "1TiB"\noptions = {depth = 3, where = ["x"]}')
        [tier] = load(file=file, environ=ENVIRON).config.tiers
        assert tier.is_custom
        assert (tier.name, tier.path) == ("glaciertier", Path("/data/kvtier/glaciertier"))
        assert tier.options == {"depth": 3, "where": ["x"]}

    def test_an_s3_tier_has_options(self, write: Any) -> None:
        """The table `options` has the bucket; the tier has no files on this host."""
        tier = load(
            file=write(
                '[[tiers]]\ntype = "s3"\n[tiers.options]\nurl = "s3://bucket/a/b"\nendpoint = "http://store:9000"\n'
                'pack = "32MiB"\ndeadline = "2s"\ncredentials_file = "/run/credentials"\nencryption_keys = "/keys"\n'
            )
        ).config.tiers[0]
        assert (tier.name, tier.size, tier.is_remote) == ("s3", 16 * GIB, True)
        options = read_s3_options(tier.options)
        assert (options.url, options.endpoint) == ("s3://bucket/a/b", "http://store:9000")
        assert (options.pack, options.deadline, options.credentials_file) == (32 << 20, 2.0, Path("/run/credentials"))
        assert list(key_files_of([tier])) == [("s3", Path("/keys"))]

    def test_a_mooncake_tier_has_options(self, write: Any) -> None:
        """It contributes no memory to Mooncake, and finds the nodes without a metadata server."""
        tier = load(
            file=write(MOONCAKE + 'master = "host:50051"\nprotocol = "rdma"\ndevice = "mlx5_0"\ndeadline = "1s"\n')
        ).config.tiers[0]
        assert (tier.name, tier.size, tier.is_remote) == ("mooncake", 16 * GIB, True)
        options = read_mooncake_options(tier.options)
        assert (options.master, options.protocol, options.device) == ("host:50051", "rdma", "mlx5_0")
        assert (options.metadata, options.local_host, options.deadline) == ("P2PHANDSHAKE", None, 1.0)

    def test_a_valkey_tier_has_options(self, write: Any) -> None:
        """It has no files here, so its default size does not depend on the disk."""
        file = write(
            '[[tiers]]\ntype = "valkey"\nttl = "3d"\n[tiers.options]\nurl = "valkeys://cache:7/2"\n'
            'username = "kv"\npassword_file = "/run/secret"\ntls_ca = "/ca"\nencryption_keys = "/keys"\n'
            'deadline = "100ms"\nin_flight = "8MiB"'
        )
        [tier] = load(file=file, environ=ENVIRON).config.tiers
        assert (tier.name, tier.size, tier.ttl, tier.is_remote) == ("valkey", 16 * GIB, 3 * 86400, True)
        options = read_valkey_options(tier.options)
        assert (options.url, options.username) == ("valkeys://cache:7/2", "kv")
        assert (options.password_file, options.tls_ca) == (Path("/run/secret"), Path("/ca"))
        assert options.encryption_keys == Path("/keys")
        assert list(key_files_of([tier])) == [("valkey", Path("/keys"))]
        assert (options.deadline, options.in_flight) == (0.1, 8 * MIB)

    def test_unknown_environment_variables(self) -> None:
        """Variables that Kubernetes adds for a service named kvtier are ignored.

        Others are a warning.
        """
        loaded = load(
            environ=ENVIRON
            | {
                "KVTIER_PORT": "tcp://10.0.0.1:50051",
                "KVTIER_SERVICE_HOST": "10.0.0.1",
                "KVTIER_METRICS_SERVICE_PORT_HTTP": "9",
                "KVTIER_PORT_50051_TCP_ADDR": "10.0.0.1",
                "KVTIER_ENDPOINT": "unix:/a.sock",
                "KVTIER_CLIENT_LOG_LEVEL": "x",
                "KVTIER_MASCOT": "otter",
            }
        )
        assert loaded.warnings == ("KVTIER_MASCOT: no such setting of the server; ignored",)


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("regoin_size = 1", "{file}: regoin_size: no such setting; did you mean region_size?"),
            ("[limits]\nmax_kyes = 1", "{file}: [limits] max_kyes: no such setting; did you mean max_keys?"),
            ("[bulk]\ngrpc_port = 1", "{file}: [bulk] grpc_port: no such setting; did you mean tcp_port?"),
            ("[limit]\nmax_keys = 1", "{file}: limit: no such setting; did you mean limits?"),
            ("zebra = 1", "{file}: zebra: no such setting"),
            ("limits = 3", "{file}: limits: must be a table, [limits]"),
            ("[limits]\nmax_keys = 0", "{file}: limits.max_keys = 0: must be between 1 and 1048576"),
            ("[limits]\nmax_keys = true", "{file}: limits.max_keys = true: must be a whole number"),
            ("[limits]\nmax_keys = 1.5", "{file}: limits.max_keys = 1.5: must be a whole number"),
            ("[retention]\npart = nan", "{file}: retention.part = nan: must be between 0 and 1"),
            ("[retention]\npart = inf", "{file}: retention.part = inf: must be between 0 and 1"),
            ('insecure = "yes"', '{file}: insecure = "yes": must be true or false'),
            ("region_size = -1", "{file}: region_size = -1: a size must not be negative"),
            ("region_size = 0x" + "f" * 6000, "{file}: region_size = 0xfff"),
            ("[cpu]\nttl = 0x" + "f" * 6000, "{file}: cpu.ttl = 0xfff"),
            ('region_size = "4K"', '{file}: region_size = "4K": not a size'),
            ("region_size = 4096", "{file}: region_size = 4096: must be at least 1MiB"),
            ('[leases]\nmax = "10 parsecs"', '{file}: leases.max = "10 parsecs": not a duration'),
            ("[leases]\nmax = nan", "{file}: leases.max = nan: a duration must be finite"),
            (
                '[log]\nlevel = "warn"',
                '{file}: log.level = "warn": must be one of debug, info, warning, error; did you me',
            ),
            ('metrics = "unix:/m"', '{file}: metrics = "unix:/m": must be HOST:PORT'),
            ('metrics = "9090"', "{file}: metrics = \"9090\": '9090' is neither"),
            ("listen = []", "{file}: listen = []: must name at least one address"),
            ('listen = ["h"]', "{file}: listen = [\"h\"]: 'h' is neither unix:PATH nor HOST:PORT"),
            ("region_size = true", "{file}: region_size = true: not a size"),
            ("data_dir = 2026-01-01", "{file}: data_dir = 2026-01-01: must be a path"),
            ("listen = [{a = 1}]", '{file}: listen = [{{"a" = 1}}]: must be a list of texts'),
            ("[auth]\nunix = true", "{file}: auth.unix = true: needs auth.tokens"),
            ("listen = 3", "{file}: listen = 3: must be a list of texts"),
            ('data_dir = ""', '{file}: data_dir = "": must be a path'),
            ("[limits", "{file}: is not TOML: "),
            ("region_size = " + "9" * 5000, "{file}: is not TOML: "),
            ("name = " + "[" * 5000, "{file}: is not TOML: "),
        ],
    )
    def test_each_error_is_one_line(self, write: Any, text: str, problem: str) -> None:
        """The line names the setting, its value, the reason, and the likely intended name."""
        file = write(text)
        [line] = problems(file=file)
        assert line.startswith(problem.format(file=file))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("tiers = 3", "tiers: must be a list of tables"),
            (
                '[[tiers]]\nsize = "1GiB"',
                "tiers, number 1: type: must be given: lmdb, disk, valkey, s3, mooncake or module:Class",
            ),
            (
                '[[tiers]]\ntype = "lmbd"',
                'type = "lmbd": must be lmdb, disk, valkey, s3, mooncake or module:Class; did you mean lmdb?',
            ),
            ('[[tiers]]\ntype = "lmdb"\nsizes = 1', "tiers, number 1: sizes: no such setting; did you mean size?"),
            ('[[tiers]]\ntype = "lmdb"\nsize = "lots"', 'tiers, number 1: size = "lots": not a size'),
            ('[[tiers]]\ntype = "lmdb"\nname = "cpu"', 'name = "cpu": must be'),
            ('[[tiers]]\ntype = "lmdb"\nname = "../x"', 'name = "../x": must be'),
            ('[[tiers]]\ntype = "lmdb"\ndurability = "eternal"', "must be one of process, power"),
            ('[[tiers]]\ntype = "lmdb"\noptions = {a = 1}', "options: a tier of type lmdb has none"),
            ('[[tiers]]\ntype = "lmdb"\n[[tiers]]\ntype = "lmdb"', "tiers: two tiers have name = lmdb"),
            ('[[tiers]]\ntype = "valkey"', "options.url: must be given"),
            (VALKEY + 'url = "cache:6379"', "options.url: must begin with valkey://"),
            (VALKEY + 'url = "valkey://me:secret@cache"', "options.url: must not contain a user or password"),
            (VALKEY + 'url = "valkey://c"\nttl = "1d"', "options.ttl: no such setting"),
            (VALKEY + 'url = "valkey://c"\ndeadline = "1m"', 'options.deadline = "1m": must be between 10ms and 5s'),
            (VALKEY + 'url = "valkey://c"\nusername = "me"', "options.username: needs options.password_file"),
            (VALKEY + 'url = "valkeys://c"\ntls_cert = "/c"', "options.tls_cert: needs options.tls_key"),
            (VALKEY + 'url = "valkey://c"\ntls_ca = "/c"', "options.tls_ca: needs TLS; use a url with valkeys://"),
            ('[[tiers]]\ntype = "valkey"\npath = "/x"', "path: a tier of type valkey has no files on this host"),
            ('[[tiers]]\ntype = "valkey"\noptions = 1', "options"),
            ('[[tiers]]\ntype = "s3"', "options.url: must be given, like s3://BUCKET/PREFIX"),
            ('[[tiers]]\ntype = "s3"\ndurability = "power"', "durability: a tier of type s3 has no files on this host"),
            (S3 + 'url = "http://bucket"', "options.url: must begin with s3://, gs://, az://, file://"),
            (S3 + 'url = "s3://key:secret@bucket"', "options.url: must contain neither credentials"),
            (S3 + 'url = "s3://b"', "options.url: must be like s3://BUCKET/PREFIX"),
            (S3 + 'url = "az://account"', "options.url: must be like az://ACCOUNT/CONTAINER/PREFIX"),
            (S3 + 'url = "s3://bucket"\npack = "1KiB"', 'options.pack = "1KiB": must be between 1MiB and 64MiB'),
            (S3 + 'url = "s3://bucket"\nendpoint = "host:1"', "options.endpoint: must be like https://HOST:PORT"),
            (S3 + 'url = "gs://bucket"\nregion = "x"', "options.region: only for s3://"),
            ('[[tiers]]\ntype = "mooncake"', "options.master: must be given, like HOST:50051"),
            (MOONCAKE + 'master = "host"', "options.master: must be like HOST:PORT"),
            (MOONCAKE + 'master = "host:99999"', "options.master: must be like HOST:PORT"),
            (MOONCAKE + 'master = "a/b@[c:1"', "options.master: must be like HOST:PORT"),
            (MOONCAKE + 'master = "a:1"\nmetadata = "http://[a"', "options.metadata: Invalid IPv6 URL"),
            (S3 + 'url = "s3://[bucket"', "options.url: Invalid IPv6 URL"),
            (S3 + 'url = "s3://bucket"\nendpoint = "http://[a"', "options.endpoint: Invalid IPv6 URL"),
            (MOONCAKE + 'master = "a:1"\nmetadata = "etcd"', "options.metadata: must be P2PHANDSHAKE, or a URL"),
            (MOONCAKE + 'master = "a:1"\nprotocol = "udp"', 'options.protocol = "udp": must be one of tcp, rdma'),
            (MOONCAKE + 'master = "a:1"\ndevice = "mlx5_0"', 'options.device: only for protocol = "rdma"'),
            ('[[tiers]]\ntype = "mooncake"\nttl = "1d"', "ttl: values in Mooncake have no time to live"),
        ],
    )
    def test_tier_tables_are_checked(self, write: Any, text: str, problem: str) -> None:
        """The error names a tier by its number."""
        file = write(text)
        lines = problems(file=file)
        assert lines[0].startswith(f"{file}: ")
        assert problem in lines[0]

    def test_all_errors_are_reported(self, write: Any) -> None:
        """The report covers every source, not only the first error."""
        file = write('a = 1\n[log]\nlevel = "x"')
        lines = problems(flags={"region_size": "x"}, file=file, environ=ENVIRON | {"KVTIER_REGION_SZIE": "1"})
        assert [line.split(":")[0] for line in lines] == [str(file), str(file), "KVTIER_REGION_SZIE", "--region-size"]
        assert lines[2].endswith("did you mean KVTIER_REGION_SIZE?")

    def test_an_unreadable_file_is_named(self, tmp_path: Path) -> None:
        """The file is missing, a directory, or not text."""
        assert problems(file=tmp_path / "none.toml") == [
            f"{tmp_path}/none.toml: cannot be read: No such file or directory"
        ]
        assert problems(file=tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        assert "is not TOML" in problems(file=tmp_path / "binary")[0]

    def test_contradicting_values_are_refused(self) -> None:
        [line] = problems(environ=ENVIRON | {"KVTIER_LEASES_DEFAULT": "20m"})
        assert line == "KVTIER_LEASES_DEFAULT: leases.default = 20m: must not exceed leases.max = 10m"
        [line] = problems(environ=ENVIRON | {"KVTIER_HANDOFF_DEFAULT": "20m"})
        assert line == "KVTIER_HANDOFF_DEFAULT: handoff.default = 20m: must not exceed handoff.max = 10m"
        [line] = problems(environ=ENVIRON | {"KVTIER_LIMITS_MAX_MESSAGE_BYTES": "1MiB"})
        assert "limits.max_message_bytes = 1MiB: must be at least 5648KiB" in line
        [line] = problems(environ=ENVIRON | {"KVTIER_HANDOFF_DEFAULT": "5s"})
        assert line.endswith("handoff.default = 5s: must be more than 5 s: a hold near its end cannot be claimed")
        assert len(problems(environ=ENVIRON | {"KVTIER_HANDOFF_DEFAULT": "1s", "KVTIER_HANDOFF_MAX": "2s"})) == 2
        [line] = problems(environ=ENVIRON | {"KVTIER_REGION_SIZE": "900TiB"})
        assert "must be less than the memory of this machine" in line

    def test_settings_of_other_servers_are_checked(self, write: Any) -> None:
        """Without `peers.servers` the deadline has no effect and no other setting depends on it."""
        loaded = load({"peers.servers": "KV.site.:7450"}, environ=ENVIRON | {"KVTIER_PEERS_CA": "/ca.pem"})
        assert loaded.config.peers.servers == ("kv.site:7450",)
        load({"limits.tier_stall": "1s"}, environ=ENVIRON)
        peers = {"KVTIER_PEERS_SERVERS": "a:1, b:2"}
        for more, complaint in (
            ({"KVTIER_LIMITS_TIER_STALL": "1s"}, "peers.deadline = 2s: must be less than limits.tier_stall"),
            ({"KVTIER_PEERS_CERT": "/c.pem"}, "needs peers.key too"),
            ({"KVTIER_PEERS_TOKEN_FILE": "/t"}, "the token is not sent without TLS"),
            ({"KVTIER_PEERS_SERVERS": "unix:/a.sock"}, "must be HOST:PORT"),
            ({"KVTIER_PEERS_SERVERS": "kv.site:0"}, "must be HOST:PORT"),
        ):
            [line] = problems(environ=ENVIRON | peers | more)
            assert complaint in line
        named = write('[peers]\nservers = ["a:1"]\n[[tiers]]\ntype = "lmdb"\nname = "peers"')
        [line] = problems(file=named)
        assert "rename the other tier" in line

    def test_tcp_in_the_clear_needs_insecure(self) -> None:
        """The loopback interface, too; with --insecure there is a warning."""
        [line] = problems(flags={"listen": ["0.0.0.0:7070"]})
        assert line.startswith("--listen: listen = 0.0.0.0:7070: everyone on the network")
        [line] = problems(flags={"listen": ["127.0.0.1:7070", "unix:/a.sock"]})
        assert line.startswith("--listen: listen = 127.0.0.1:7070: every user of this host")
        loaded = load({"listen": ["0.0.0.0:7070"], "insecure": True}, environ=ENVIRON)
        assert loaded.warnings[0].startswith("listening on 0.0.0.0:7070 unencrypted")
        loaded = load({"listen": ["127.0.0.1:7070"], "insecure": True}, environ=ENVIRON)
        assert loaded.warnings[0].startswith("listening on 127.0.0.1:7070 unencrypted: every user of this host")

    def test_readers_of_events_on_tcp_need_keys_or_a_permission(self) -> None:
        """The loopback interface, too. Each address has a line, or a warning if it is permitted."""
        publish, replay = {"events.publish": "tcp://127.0.0.1:5557"}, {"events.replay": "tcp://0.0.0.0:5558"}
        [line, other] = problems(flags=publish | replay)
        assert "events.publish = tcp://127.0.0.1:5557: every user of this host could read the events" in line
        assert "events.replay = tcp://0.0.0.0:5558: everyone on the network could read the events" in other
        for permitted in ({"events.insecure": True}, {"insecure": True}):
            loaded = load(publish | replay | permitted, environ=ENVIRON)
            assert [line.partition(":")[0] for line in loaded.warnings] == ["events on tcp", "events on tcp"]
        assert load(publish | replay | {"events.keys": "/k.toml"}, environ=ENVIRON).warnings == ()
        assert load({"events.publish": "ipc:///run/k/pub"}, environ=ENVIRON).warnings == ()
        [line] = problems(flags={"events.keys": "/k.toml"})
        assert line.endswith("needs events.publish")
        [line] = problems(flags={"events.publish": "ipc://@name"})
        assert "abstract socket" in line

    def test_tcp_needs_tls_and_credentials(self) -> None:
        """Credentials are tokens or client certificates.

        Settings that need each other are checked.
        """
        tls = {"listen": ["127.0.0.1:7070"], "tls.cert": "/c.pem", "tls.key": "/k.pem"}
        [line] = problems(flags=tls)
        assert "clients are not authenticated; set auth.tokens or tls.client_ca" in line
        assert (
            load(tls | {"insecure": True}, environ=ENVIRON)
            .warnings[0]
            .startswith("listening on 127.0.0.1:7070 without authentication")
        )
        for asks in ({"auth.tokens": "/t.toml"}, {"tls.client_ca": "/ca.pem"}):
            assert load(tls | asks, environ=ENVIRON).warnings == ()
        [line] = problems(flags={"listen": ["127.0.0.1:7070"], "auth.tokens": "/t.toml"})
        assert "unencrypted" in line
        assert problems(flags={"tls.cert": "/c.pem"}) == ["--tls-cert: tls.cert = /c.pem: needs tls.key too"]
        assert problems(flags={"tls.key": "/k.pem"}) == ["--tls-key: tls.key = /k.pem: needs tls.cert too"]
        assert problems(flags={"tls.client_ca": "/c.pem"})[0].endswith("needs tls.cert and tls.key")
        assert problems(flags={"auth.unix": True})[0].endswith("needs auth.tokens, a token file")
        assert problems(flags={"auth.metrics": True})[0].endswith("needs auth.tokens, a token file")
        loaded = load({"metrics": "0.0.0.0:9464"}, environ=ENVIRON)
        assert loaded.warnings[0].startswith("metrics on 0.0.0.0:9464: the whole network")


class TestProxies:
    """A destination that is reached through a proxy is named, even if it is this host."""

    S3 = 'tiers = [{type = "s3", options = {url = "s3://bucket/prefix", endpoint = "http://127.0.0.1:9000"}}]\n'
    TRACING = '[tracing]\nendpoint = "http://localhost:4317"\n'

    @pytest.mark.parametrize(
        ("variables", "named"),
        [
            ({"http_proxy": "http://user:secret@p:1"}, ["127.0.0.1", "localhost"]),
            ({"HTTP_PROXY": "http://user:secret@p:1"}, ["127.0.0.1", "localhost"]),
            ({"https_proxy": "http://p:1"}, ["localhost"]),
            ({"ALL_PROXY": "http://p:1"}, ["127.0.0.1"]),
            ({"grpc_proxy": "http://p:1"}, ["localhost"]),
            ({"http_proxy": "http://p:1", "no_proxy": "localhost, 127.0.0.1"}, []),
            ({"http_proxy": "http://p:1", "NO_PROXY": "*"}, []),
            ({"http_proxy": "http://p:1", "no_proxy": "example.org,calhost"}, ["127.0.0.1", "localhost"]),
            ({"http_proxy": ""}, []),
            ({}, []),
        ],
    )
    def test_destinations(self, write: Any, variables: dict[str, str], named: list[str]) -> None:
        loaded = load(file=write(self.S3 + self.TRACING), environ={"XDG_DATA_HOME": "/data", **variables})
        found = [warning for warning in loaded.warnings if "proxy" in warning]
        assert len(found) == len(named)
        for warning, host in zip(found, named, strict=True):
            assert f"to {host} go through the proxy of " in warning
            assert "secret" not in warning

    def test_a_provider(self, write: Any) -> None:
        path = write('tiers = [{type = "s3", options = {url = "s3://bucket/prefix"}}]\n')
        environ = {"XDG_DATA_HOME": "/data", "https_proxy": "http://p:1"}
        assert any("s3.amazonaws.com" in warning for warning in load(file=path, environ=environ).warnings)
        environ["no_proxy"] = ".amazonaws.com"
        assert not any("proxy" in warning for warning in load(file=path, environ=environ).warnings)
