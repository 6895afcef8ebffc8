# Sourced by the scripts of this folder. Sets root (the checkout), jobs and PATH; gives die, have and venv.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=$(nproc 2>/dev/null || echo 2)
PATH=$root/.venv/bin:$PATH

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }
