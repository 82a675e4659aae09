"""Commands of the README."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import disagg_proxy
import pytest
from harness.disagg_site import Site
from harness.fake_engine import FakeEngine, RecordedRequest, send_answer

README = Path(disagg_proxy.__file__).with_name("README.md").read_text()
ANSWER = "They said: \"it\\s 'blue' $HOME\".\n\tYes"


async def odd(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    """An answer with characters that a shell and JSON must quote."""
    answer = engine.complete_answer(asked)
    answer["choices"][0]["text"] = ANSWER
    await send_answer(writer, 200, json.dumps(answer).encode())


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs jq and curl")
async def test_three_turns_as_the_readme_has_them(site: Site) -> None:
    """Answers with quotes and new lines are used unchanged in the next prompt."""
    typed = re.search(r"^\$ (talk\(\).*?)^```", README, re.MULTILINE | re.DOTALL)
    site.decode[0].script.extend([odd] * 3)
    async with site.proxy() as proxy:
        script = re.sub(r"^\$ ", "", typed[1], flags=re.MULTILINE).replace("localhost:8000", proxy.url)
        process = await asyncio.create_subprocess_exec("bash", "-euc", script, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
    assert process.returncode == 0
    assert printed.decode().startswith(ANSWER)
    assert 'reuse="hit"} 2.0' in printed.decode()
    first, second, third = (asked.body["prompt"] for asked in site.decode[0].seen)
    assert second == f"{first}{ANSWER} And the wind?"
    assert third == f"{second}{ANSWER} And the rain?"
