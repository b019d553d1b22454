"""Wrong usage and bad data: one line, the right exit code, no traceback."""

import gzip

import pytest

from .conftest import run_shell

pytest.importorskip("click", reason="the command needs the cli extra")
import click

from kvoffload.cli._options import read_capacity, typed_command, values_of

GOOD = b'{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n'


def test_lists_of_capacities_are_no_numbers_in_groups():
    for text in ("9,10", "10, 200", "1000,200", "0.5%,10%", "500,100%", "20,1000", "30,60,120,342"):
        found = values_of(read_capacity)(None, None, (text,))
        assert [one.text for one in found] == [part.strip() for part in text.split(",")]


def test_the_command_of_a_page_has_no_secret():
    given = ["--salt", "PIN", "--salt=PIN", "--shared", "5%,redis://a:PIN@host/0?capacity=2TB"]
    with click.Context(click.Command("advise"), obj=given):
        assert typed_command().endswith(" --shared '5%,redis://host/0?capacity=2TB'")
        assert "PIN" not in typed_command()


@pytest.mark.thorough
def test_standard_input_that_is_not_read_is_named(tmp_path):
    (tmp_path / "trace").write_bytes(GOOD)
    replay = "kvoffload replay --limit 20 --policy lru --capacity 5"
    said = "note: a generated workload was replayed; standard input was not read: TRACE - reads it"
    for script in (f'{replay} < "$folder/trace"', f'cat "$folder/trace" | {replay}'):
        done = run_shell(script, folder=tmp_path)
        assert (done.code, done.err) == (0, f"{said}\n"), script
        assert run_shell(script.replace("replay", "replay --quiet"), folder=tmp_path).err == ""
    for script in (f"{replay} < /dev/null", f"{replay} <&-", f": | {replay}"):
        assert run_shell(script, folder=tmp_path).err == "", script
    assert "note" not in run_shell(f'{replay} - < "$folder/trace"', folder=tmp_path).err


def test_bad_data_from_a_pipe(kvoffload):
    cut = gzip.compress(GOOD)[:-4]
    for data, rule in ((b"", "1: a trace must hold at least one"), (cut, "2: must be readable to")):
        done = kvoffload("info", "-", stdin=data)
        assert done.code == 1
        assert done.error.startswith(f"<stdin>:{rule}")
