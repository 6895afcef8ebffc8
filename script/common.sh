# Sourced by the scripts of this folder. Sets root (the checkout), jobs and PATH; gives what follows.
# A script ends with status 2 where its arguments, or files that they name, cannot be used; it finds that out
# before it sets up or builds anything. Whatever else goes wrong is status 1. Either way one sentence says it.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=$(nproc 2>/dev/null || echo 2)
PATH=$root/.venv/bin:$PATH

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# refuse SENTENCE: of an argument.
refuse() {
    echo "${0##*/}: $*" >&2
    exit 2
}

have() { command -v "$1" >/dev/null 2>&1; }

# answer_help ARGUMENTS...: where help is asked for, prints the comment that the script begins with, and ends.
answer_help() {
    local argument
    for argument in "$@"; do
        case "$argument" in
        -h | --help)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
            exit 0
            ;;
        esac
    done
}

# check_output OPTION FILE: refuses a file that could not be written. Changes nothing.
check_output() {
    local place=$2
    [ ! -d "$2" ] || refuse "$1 is $2, which is a folder; it must be a file"
    [ -e "$2" ] || place=$(dirname "$2")
    [ -e "$place" ] || refuse "$1 is $2, but there is no folder $place"
    [ -w "$place" ] || refuse "$1 is $2, which may not be written"
}
