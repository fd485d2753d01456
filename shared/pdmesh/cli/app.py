"""The `pdmesh` command: one name for the whole mesh, each service, and a client to try them with."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pdmesh import __version__
from pdmesh.cli.main import become
from pdmesh.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from pdmesh.supervisor.roles import Role

CHAT_URL = "http://127.0.0.1:8000/v1"
SCALE_TIMEOUT_S = 900.0

# Services read their own flags, environment and TOML file; this command hands everything on, `--help` too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    help="An LLM serving mesh with prefill and decode disaggregated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible API.")]
Model = Annotated[str, typer.Option(help="Model name; empty: the first that the server lists.")]
ApiKey = Annotated[str, typer.Option(envvar=["PDMESH_API_KEY", "OPENAI_API_KEY"], help="Key for the API.")]
Text = Annotated[str, typer.Argument(metavar="[TEXT]", help="Send this, as --quick does.", show_default=False)]
Quick = Annotated[str, typer.Option("--quick", "-q", metavar="TEXT", help="Send this, print the answer and end.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens per answer.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy; default: the server's.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print time to first token, speed and route after each answer.")]


@app.command(context_settings=PASS_ON)
def up(context: typer.Context) -> None:
    """Start a whole mesh on this machine (`pdmesh up --help`)."""
    from pdmesh.supervisor import run_up

    raise typer.Exit(run_up(context.args))


@app.command()
def scale(
    engines: Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="prefill=N and decode=N.")],
    port: Annotated[int, typer.Option(help="The --port of that `pdmesh up`.")] = 8000,
) -> None:
    """Change the number of engines of a running `pdmesh up`, without losing a request."""
    from pdmesh.supervisor import scale as ask

    for line in ask(port, _parse_engines(engines), SCALE_TIMEOUT_S):
        typer.echo(line)


@app.command(context_settings=PASS_ON)
def proxy(context: typer.Context) -> None:
    """Run the proxy: the door for clients (`pdmesh proxy --help`)."""
    become("proxy", context.args)


@app.command(context_settings=PASS_ON)
def prefill(context: typer.Context) -> None:
    """Run a prefill engine (`pdmesh prefill --help`)."""
    become("prefill", context.args)


@app.command(context_settings=PASS_ON)
def decode(context: typer.Context) -> None:
    """Run a decode engine (`pdmesh decode --help`)."""
    become("decode", context.args)


@app.command(context_settings=PASS_ON)
def kvcache(context: typer.Context) -> None:
    """Run the KV-cache tier (`pdmesh kvcache --help`)."""
    become("kvcache", context.args)


@app.command(context_settings=PASS_ON)
def serve(context: typer.Context) -> None:
    """Run one engine alone behind the OpenAI API on port 8000: pdmesh serve MODEL (`pdmesh serve --help`)."""
    become("serve", context.args)


@app.command("run-batch", context_settings=PASS_ON)
def run_batch(context: typer.Context) -> None:
    """Answer an OpenAI batch file with one engine: -i in.jsonl -o out.jsonl --model MODEL (`pdmesh run-batch --help`)."""
    from pdmesh.offline.batch import main as run

    raise typer.Exit(run(context.args))


@app.command()
def chat(
    text: Text = "",
    url: Url = CHAT_URL,
    model: Model = "",
    api_key: ApiKey = "",
    system_prompt: Annotated[str, typer.Option(help="First message of the conversation.")] = "",
    quick: Quick = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    stats: Stats = False,
) -> None:
    """Talk with a model; a line each turn, Ctrl-D ends it."""
    from pdmesh.cli.client import Client, run_chat

    with Client(url, model, api_key, max_tokens, temperature) as client:
        run_chat(client, system_prompt, quick or text, stats)


@app.command()
def complete(
    text: Text = "",
    url: Url = CHAT_URL,
    model: Model = "",
    api_key: ApiKey = "",
    quick: Quick = "",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    stats: Stats = False,
) -> None:
    """Let a model continue a text; a prompt each line, Ctrl-D ends it."""
    from pdmesh.cli.client import Client, run_complete

    with Client(url, model, api_key, max_tokens, temperature) as client:
        run_complete(client, quick or text, stats)


@app.command()
def status(url: Url = CHAT_URL, api_key: ApiKey = "", json: Json = False) -> None:
    """Say which engines a proxy has and how busy they are, and which of them cannot hand over to each other and why."""
    from pdmesh.cli.status import status_json, status_lines

    if json:
        typer.echo(status_json(url, api_key))
        return
    for line in status_lines(url, api_key):
        typer.echo(line)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Run the command line; a MeshError is one line and exit code 2 (configuration) or 1."""
    try:
        app(prog_name="pdmesh")
    except MeshError as exc:
        sys.stderr.write(f"pdmesh: {exc.message}\n")
        sys.exit(2 if isinstance(exc, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parse_engines(texts: list[str]) -> "dict[Role, int]":
    from pdmesh.supervisor.roles import Role

    wanted = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in ("prefill", "decode") or not number.isdecimal():
            raise ConfigError(f"scale: {text!r} is not prefill=N or decode=N")
        wanted[Role(name)] = int(number)
    return wanted
