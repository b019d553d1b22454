"""Commands with subcommands."""

from __future__ import annotations

from importlib import import_module

import click

from kvoffload._extras import require
from kvoffload._interrupts import raise_again

SUMMARIES = {
    "replay": "Replay a trace through managers and compare policies.",
    "sweep": "Compare policies over a range of capacities, in parallel.",
    "diff": "Compare two outputs of replay, sweep or fleet, also of 0.4.",
    "fleet": "Compare engines behind a router: how many, which router, how much memory.",
    "advise": "Recommend a policy for a trace, a model and a memory.",
    "policies": "List the policies and the ceilings, with their options.",
    "models": "List the models that --model takes by name.",
    "info": "Describe a trace: requests, blocks and their reuse, and when sessions return.",
    "generate": "Write a generated workload as a trace in the Mooncake format.",
    "convert": "Write a trace in the Mooncake format, or for libCacheSim.",
    "workload": "Write a trace as prompts for vllm bench serve.",
    "tier": "Inspect, verify and delete blocks that tiers keep on disks.",
    "top": "Show whether offloading pays, and what would pay more.",
    "dashboard": "Print a Grafana dashboard and Prometheus rules for the metrics of watches.",
    "demo": "Serve the metrics of a manager at work, without an engine.",
}
"""The first line of each command's help, so that the list needs no command's module."""


class Group(click.Group):
    """A command with subcommands, which prints its help as an error if it gets no arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; without any, print the help and exit."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(click.UsageError.exit_code)
        return super().parse_args(ctx, args)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; click would cut a summary that it finds itself."""
        cmd.short_help = (cmd.help or "").partition("\n")[0]
        super().add_command(cmd, name)


class RootGroup(Group):
    """The root of the command; it imports the module of a command that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's)
        """Return the names of the commands."""
        return sorted(SUMMARIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None if there is none of that name."""
        if cmd_name in SUMMARIES and cmd_name not in self.commands:
            for module in ("rich", "msgspec"):
                require(module, "the command")
            self.add_command(getattr(import_module(f".{cmd_name}", __package__), cmd_name))
            raise_again()
        return super().get_command(ctx, cmd_name)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 (click's)
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the list of the commands, each with its whole summary."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUMMARIES.items()))
