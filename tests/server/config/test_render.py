"""The configuration as TOML, JSON and reference text."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from kvtier.server.config import render
from kvtier.server.config.fields import SETTINGS, TIER_SETTINGS
from kvtier.server.config.loader import load
from kvtier.server.config.remote import VALKEY_OPTIONS
from kvtier.server.config.schema import Config
from kvtier.server.config.units import GIB, MIB

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_DATA_HOME": "/data"}


def test_toml_reads_back(write: Any) -> None:
    """The output of `kvtier config` gives the same configuration, including odd characters."""
    first = load(
        {
            "listen": ["unix:/a b/ü\t\"q'.sock", "127.0.0.1:7"],
            "region_size": str(MIB + 1),
            "metrics": "h:1",
            "insecure": True,
        },
        file=write(
            '[[tiers]]\ntype = "lmdb"\n[[tiers]]\ntype = "a.b:C"\noptions = {x = [1, {y = true}], "z z" = 1.5}\n'
            '[[tiers]]\ntype = "valkey"\noptions = {url = "valkey://host", deadline = "100ms"}\n'
            '[[tiers]]\ntype = "s3"\noptions = {url = "s3://bucket/prefix", pack = "8MiB"}\n'
            '[[tiers]]\ntype = "mooncake"\noptions = {master = "host:50051", protocol = "rdma"}'
        ),
        environ=ENVIRON | {"KVTIER_LEASES_DEFAULT": "1500ms"},
    )
    text = render.to_toml(first)
    assert load(file=write(text), environ={}).config == first.config
    assert "# KVTIER_LEASES_DEFAULT" in text
    assert "# --region-size" in text


def test_toml_of_tenants_reads_back(write: Any) -> None:
    """Quotas, limits and rates are included."""
    file = write(
        '[tenants.acme]\nquota = "25%"\nlimit = {cpu = "32MiB"}\nrates = {calls = 2.5, bytes = "5MiB", sessions = 4}\n'
        '[tenants."o t"]\nrates = {bytes = 1025}'
    )
    first = load({"region_size": "64MiB"}, file=file, environ=ENVIRON)
    second = load(file=write(render.to_toml(first)), environ={})
    assert second.config.tenants == first.config.tenants
    assert second.config.tenants[0].rates.calls == 2.5
    values = json.loads(render.to_json(first))["config"]["tenants"]
    assert values["acme"]["rates"] == {"calls": 2.5, "bytes": "5MiB", "sessions": 4}


def test_toml_of_cpu_only(write: Any) -> None:
    """An empty list of tiers stays empty."""
    text = render.to_toml(load({"tiers": ()}, environ=ENVIRON))
    assert load(file=write(text), environ={}).config.tiers == ()


def test_json_has_bytes_and_seconds() -> None:
    """The JSON has the same values as the TOML."""
    loaded = load({"region_size": "1GiB"}, environ=ENVIRON)
    values = json.loads(render.to_json(loaded))
    assert values["config"]["region_size"] == GIB
    assert values["config"]["leases"] == {"default": 60.0, "max": 600.0, "part": 0.75}
    assert values["config"]["tiers"][0]["type"] == "lmdb"
    assert values["origins"]["region_size"] == "--region-size"


def test_reference_describes_every_setting() -> None:
    """Every setting has its name, variable, default and meaning."""
    text = render.reference()
    for setting in (*SETTINGS.values(), *TIER_SETTINGS.values(), *VALKEY_OPTIONS.values()):
        assert f"`{setting.key}`" in text
        assert setting.doc.endswith(".")
        assert setting.doc in text


def test_the_printed_file_is_valid_toml() -> None:
    """It has the tables of the configuration."""
    tables = tomllib.loads(render.to_toml(load(environ=ENVIRON)))
    assert set(tables) == set(Config.__struct_fields__) - {"tenants"}, "there are none"
