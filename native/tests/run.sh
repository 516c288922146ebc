#!/bin/sh
# Runs test programs one after the other and adds up their "N passed, M failed" lines. A program that is missing, dies, hangs
# (TEST_TIMEOUT seconds, 120 unless told) or prints no such line counts as one failure. Fuzz harnesses get their corpus as argument.
cd "$(dirname "$0")" || exit 1
BUILD=${BUILD:-build}
export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0}" UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1:second_deadlock_stack=1}"

# ThreadSanitizer does not know the address layout of kernels with many random bits; setarch -R switches the randomness off.
steady=
if setarch -R true 2>/dev/null; then steady="setarch -R"; fi
if [ "$1" = --tsan-probe ]; then
    $steady "$2" >/dev/null 2>&1
    exit $?
fi

limit=${TEST_TIMEOUT:-120}
[ -n "$MQD_TEST_LONG" ] && limit=${TEST_TIMEOUT:-1200}
passed=0 failed=0 output=$BUILD/run.$$.log
mkdir -p "$BUILD"
for program in "$@"; do
    argument=
    case "$program" in */corpus/*) argument=corpus/$(basename "$program") ;; esac
    if [ ! -x "$program" ]; then
        echo "$program: not built"
        failed=$((failed + 1))
        continue
    fi
    wrapper=
    case "$program" in */tsan/*) wrapper=$steady ;; esac
    # shellcheck disable=SC2086
    timeout "$limit" $wrapper "$program" $argument >"$output" 2>&1
    code=$?
    tally=$(grep -E '^[^ ]+: [0-9]+ passed, [0-9]+ failed$' "$output" | tail -n 1)
    good=$(echo "$tally" | sed -n 's/.*: \([0-9]*\) passed.*/\1/p')
    bad=$(echo "$tally" | sed -n 's/.* \([0-9]*\) failed.*/\1/p')
    if [ $code -ne 0 ] || [ -z "$tally" ]; then
        cat "$output"
        [ $code -eq 124 ] && echo "$program: no end after $limit s"
        [ "${bad:-0}" -eq 0 ] && bad=$((${bad:-0} + 1)) && echo "$program: exit code $code"
    fi
    passed=$((passed + ${good:-0})) failed=$((failed + ${bad:-0}))
    echo "$program: ${good:-0} passed, ${bad:-0} failed"
done
rm -f "$output"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
