# Sourced by scripts that measure a GPU machine: Markdown of what was called, and what it printed.

# section FILE COMMAND...   (appends to $directory/FILE; an exit code is told and ends nothing)
section() {
  local file=$directory/$1 code=0
  shift
  {
    echo
    echo "## \`${*//$root\//}\`"
    echo
    echo '```'
    "$@" 2>&1 || code=$?
    echo '```'
    [ "$code" -eq 0 ] || echo "Exit code $code."
  } | tee -a "$file" >&2
}
