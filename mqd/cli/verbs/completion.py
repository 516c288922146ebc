"""`mqd completion bash|zsh|fish`: click's completion scripts, each with its installation command."""

import click

_INSTALL = {
    "bash": "# install: mqd completion bash > ~/.local/share/bash-completion/completions/mqd",
    "zsh": "# install: mqd completion zsh > ~/.zfunc/_mqd   (with ~/.zfunc in fpath before compinit)",
    "fish": "# install: mqd completion fish > ~/.config/fish/completions/mqd.fish",
}


@click.command(help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None
    script = completer(ctx.find_root().command, {}, "mqd", "_MQD_COMPLETE")
    # not .source(): it starts a shell to learn its version
    body = (script.source_template % script.source_vars()).strip()
    # zsh wants its #compdef first
    lines = body.split("\n")
    insert_at = 1 if lines[0].startswith("#compdef") else 0
    click.echo("\n".join([*lines[:insert_at], _INSTALL[shell], *lines[insert_at:]]))
