"""``kvoffload policies``: the available policies."""

from __future__ import annotations

from dataclasses import asdict

import click

from kvoffload.policies import registry
from kvoffload.replay.offline import CEILINGS
from kvoffload.replay.policies import summary

from ._options import examples, json_option
from ._output import check_outputs
from ._terminal import print_json, print_prose


@click.command(
    epilog=examples("kvoffload policies", "kvoffload replay --policy 'slru?protected=0.8,sieve'")
)
@json_option
def policies(*, as_json: bool) -> None:
    """List the policies and the ceilings, with their options.

    Wherever policies are compared, --policy takes these names, with options as in
    'slru?protected=0.8', and MODULE:CLASS for a class of your own.
    """
    check_outputs(())
    entries = [registry.entry(name) for name in registry.names()]
    if as_json:
        print_json(
            {
                "policies": [
                    {
                        "name": entry.name,
                        "summary": entry.summary,
                        "ranks_by_return": entry.ranks_by_return,
                        "options": [asdict(option) for option in entry.options],
                    }
                    for entry in entries
                ],
                "ceilings": [{"name": name, "summary": summary(name)} for name in CEILINGS],
            }
        )
        return
    for entry in entries:
        print_prose(f"{entry.name:12} {entry.summary}", " " * 13)
        for option in entry.options:
            bounds = f"{option.minimum:g} to {option.maximum:g}"
            text = f"?{option.name}={option.default}  {option.summary}, {bounds}"
            print_prose(f"{'':15}{text}", " " * 17)
    ranking = " and ".join(entry.name for entry in entries if entry.ranks_by_return)
    click.echo()
    print_prose(
        f"hints: {ranking} ranks blocks by when clients expect their session to return; the others "
        "ignore that. All evict first the blocks of a session that ends, except those that other "
        "sessions share."
    )
    click.echo("\nceilings:")
    for name in CEILINGS:
        print_prose(f"{name:12} {summary(name)}", " " * 13)
