"""The command itself, before any of its subcommands."""

from __future__ import annotations

import tomllib
from pathlib import Path

from typer.testing import CliRunner

from stretto import cli

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.output, result.exit_code) == (f"stretto {PROJECT['version']}\n", 0)


def test_without_a_command_the_help_is_shown():
    shown = CliRunner().invoke(cli.app, [])
    assert "Usage" in shown.output and "doctor" in shown.output and "--version" in shown.output
