"""Scripts that have a shell complete the commands and keys of gerl: `gerl completion bash|zsh|fish`.

Each script asks `gerl --complete WORD ...` for the words that fit (`gerl.program.words`).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command

# A word of bash ends at = as well, so what is completed is the part behind the last one.
BASH = r"""
_gerl() {
    local line=${COMP_LINE:0:COMP_POINT} words current prefix candidate
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current=${words[${#words[@]}-1]}
    prefix=
    [[ $current == *=* && $COMP_WORDBREAKS == *=* ]] && prefix=${current%"${current##*=}"}
    COMPREPLY=()
    while IFS=$'\t' read -r candidate _; do
        [[ $candidate == *[=./] ]] && compopt -o nospace
        COMPREPLY+=("${candidate#"$prefix"}")
    done < <("${words[0]}" --complete "${words[@]:1}" 2>/dev/null)
}
complete -o default -o nosort -F _gerl gerl
"""
ZSH = r"""
#compdef gerl
_gerl() {
    local line candidate
    local -a open closed
    for line in "${(@f)$("${words[1]}" --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -z $line ]] && continue
        candidate=${line%%$'\t'*}
        line=${line#*$'\t'}
        line="${candidate//:/\\:}${line:+:$line}"
        if [[ $candidate == *[=./] ]]; then open+=("$line"); else closed+=("$line"); fi
    done
    if (( ${#open} + ${#closed} == 0 )); then
        compset -P '*='
        _files
        return
    fi
    (( ${#open} )) && _describe -V gerl open -S ''
    (( ${#closed} )) && _describe -V gerl closed
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _gerl "$@"; else compdef _gerl gerl; fi
"""
FISH = r"""
function __gerl_words
    set -l words (commandline -opc) (commandline -ct)
    $words[1] --complete $words[2..-1] 2>/dev/null
end
complete -c gerl -f -n 'not string match -q "*=*" -- (commandline -ct)' -a '(__gerl_words)'
complete -c gerl -n 'string match -q "*=*" -- (commandline -ct)' -a '(__gerl_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The keys of the command line."""

    shell: Literal["bash", "zsh", "fish"] = key("bash, zsh or fish", required=True)


PARSER = Parser(
    "completion",
    "gerl completion",
    "bash|zsh|fish",
    "Print a script for shell completion of commands, keys, experiments, algorithms and choices.",
    Request,
    bare="shell",
    notes='bash, in ~/.bashrc: eval "$(gerl completion bash)"; zsh, in ~/.zshrc below compinit: eval "$(gerl '
    'completion zsh)"; fish: gerl completion fish > ~/.config/fish/completions/gerl.fish',
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""

    def work(arguments: Sequence[str]) -> None:
        sys.stdout.write(SCRIPTS[PARSER.parse(arguments)[0].shell].lstrip("\n"))

    return run_command(argv, lambda: PARSER.help(program), work)
