"""Tenants in the configuration, and the tenant of a namespace."""

import typing
from pathlib import Path

import pytest
from harness.payloads import namespace_of

from kvtier.server.config.loader import Loaded, load
from kvtier.server.config.render import to_json, to_toml
from kvtier.server.config.schema import Admission, ConfigError, Eviction
from kvtier.server.config.tenants import tenant_tag, tenants_of, tier_settings
from kvtier.server.config.units import MIB
from kvtier.server.rpc.sessions import namespace_spec
from kvtier.tiers.eviction import DEFAULT_POLICY, POLICIES
from kvtier.tiers.eviction.admission import ADMISSION, DEFAULT_ADMISSION

BASE = 'region_size = "64MiB"\ntiers = [{type = "lmdb", size = "100MiB"}]\n'


class OpenTier:
    """The attributes of an open tier that quotas use."""

    name = "lmdb"
    capacity_bytes = 80 * MIB


def read(path: Path, text: str) -> Loaded:
    file = path / "kvtier.toml"
    file.write_text(BASE + text, encoding="utf-8")
    return load(file=file, environ={})


def test_quotas_are_percentages_or_sizes(tmp_path: Path) -> None:
    """A percentage refers to the usable capacity of a tier, not to the size of its files."""
    loaded = read(tmp_path, '[tenants.acme]\nquota = "25%"\nlimit = "50 %"\n[tenants."b c"]\nquota = {cpu = "2MiB"}\n')
    acme, other = tenants_of(loaded.config, 64 * MIB, [OpenTier()])  # type: ignore[list-item]
    assert (acme.name, acme.tag) == ("acme", tenant_tag("acme"))
    assert (acme.quotas, acme.limits) == (
        {"cpu": 16 * MIB, "lmdb": 20 * MIB},
        {"cpu": 32 * MIB, "lmdb": 40 * MIB},
    )
    assert (other.name, other.quotas, other.limits) == ("b c", {"cpu": 2 * MIB}, {})


def test_printed_tenants_read_back(tmp_path: Path) -> None:
    """`kvtier config` prints TOML and JSON of the same configuration."""
    text = '[tenants."b c"]\nquota = {cpu = "2MiB", lmdb = "10%"}\n[cpu]\nttl = "90s"\neviction = "lru"\n'
    loaded = read(tmp_path, text)
    shown = tmp_path / "shown.toml"
    shown.write_text(to_toml(loaded), encoding="utf-8")
    assert load(file=shown, environ={}).config == loaded.config
    assert '"10%"' in to_json(loaded)


def test_tenants_in_the_environment() -> None:
    """The variable has a TOML table."""
    environ = {"KVTIER_TENANTS": '{acme = {quota = "25%"}}', "KVTIER_TIERS": "none"}
    (tenant,) = load(environ=environ).config.tenants
    assert (tenant.name, {tier: str(amount) for tier, amount in tenant.quota.items()}) == ("acme", {"cpu": "25%"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tenants.a]\nquota = "60%"\n[tenants.b]\nquota = "41%"', "tier cpu: the quotas add up to"),
        (
            '[tenants.a]\nquota = {lmdb = "81MiB"}',
            "tier lmdb: the quotas add up to 81.0 MiB, 1.0 MiB more than the 80.0 MiB that",
        ),
        ('[tenants.a]\nquota = "60%"\nlimit = "50%"', "the limit of tenant a is less than its quota"),
        ('[tenants.a]\nquota = "101%"', "must be at most 100%"),
        ('[tenants.a]\nquota = "2GiB"', "a size needs a tier"),
        ('[tenants.a]\nquota = {lmbd = "25%"}', "there is no tier lmbd.*did you mean lmdb"),
        ('[tenants.a]\nquota = {cpu = "much"}', 'quota.cpu = "much": must be a size'),
        ("[tenants.a]\nquota = true", "quota = true: must be a size"),
        ("[tenants.a]\nrates = {calls = [false]}", r"rates.calls = \[false\]: must be"),
        ('[tenants.a]\nqouta = "25%"', "did you mean quota"),
        ("[tenants.a]", "must have quota, limit or rates"),
        ('[tenants.""]\nquota = "25%"', "a tenant must have a name"),
        ('tenants = "x = "', "must be .none. or a table of tables"),
        ("tenants = 7", "must be tables"),
        ("[cpu]\nttl = 0", "at least 1s"),
        ('[cpu]\neviction = "fifo"', "must be one of forecast, lru, arc, mq"),
        ("[retention]\npart = 2", "between 0 and 1"),
    ],
)
def test_bad_quotas_are_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file and the setting."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_two_tenants_with_one_tag_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks could not be told apart."""
    monkeypatch.setattr("kvtier.server.config.tenants.tenant_tag", lambda _: b"same")
    with pytest.raises(ConfigError, match="same tag"):
        read(tmp_path, '[tenants.a]\nquota = "1%"\n[tenants.b]\nquota = "1%"')


def test_every_policy_can_be_configured() -> None:
    """Each tier has its policy; the default is that of the core."""
    assert set(typing.get_args(Eviction)) == set(POLICIES)
    assert set(typing.get_args(Admission)) == set(ADMISSION)
    config = load(environ={"KVTIER_TIERS": '[{type = "lmdb", size = "100MiB", eviction = "arc", ttl = "1h"}]'}).config
    keeping = tier_settings(config, [], (0,))
    assert keeping.eviction == {"cpu": DEFAULT_POLICY, "lmdb": "arc"}
    assert keeping.admission == {"lmdb": DEFAULT_ADMISSION}
    assert keeping.ttl == {"lmdb": 3600}


def test_estimates_can_be_turned_off() -> None:
    """By default the server estimates the hit ratio of other sizes."""
    assert tier_settings(load(environ={}).config, [], (0,)).estimates
    turned_off = load(environ={"KVTIER_ESTIMATES": "off"}).config
    assert not tier_settings(turned_off, [], (0,)).estimates


def test_the_id_of_a_namespace_begins_with_its_tenant() -> None:
    """The shares of tenants are therefore known from the blocks that a tier kept."""
    specs = [
        namespace_spec(namespace_of(4096, model=model, tenant=tenant).to_proto())
        for model in ("one", "two")
        for tenant in ("acme", "other", "")
    ]
    assert [spec.id[:16] for spec in specs] == [tenant_tag(tenant) for tenant in ("acme", "other", "")] * 2
    assert len({spec.id for spec in specs}) == len({spec.id[16:] for spec in specs}) == 6
    assert {len(spec.id) for spec in specs} == {32}
