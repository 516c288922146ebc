#!/bin/sh
# Runs test programs one after the other and adds up their "N passed, M failed" lines. A program that is missing, dies, hangs
# (TEST_TIMEOUT seconds, 120 by default) or prints no such line counts as one failure. Fuzz harnesses get their corpus as argument.
#
#   run.sh PROGRAM...          runs all of them
#   run.sh --tally PROGRAM     runs one and leaves "passed failed" in PROGRAM.tally, for make, which runs several at a time
#   run.sh --sum PROGRAM...    adds up what --tally left, and removes it
cd "$(dirname "$0")" || exit 1
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

tally_of() {
    program=$1 argument='' wrapper=''
    case "$program" in
    */corpus/*) argument=corpus/$(basename "$program") ;;
    */tsan/*) wrapper=$steady ;;
    esac
    # timeout has a process group of its own, which an interrupt from the terminal does not reach.
    # Set before the program runs: an interrupt in between would leave it running.
    trap 'kill $!; wait $!; rm -f "$program.log"; exit 130' HUP INT TERM
    # shellcheck disable=SC2086
    timeout "$limit" $wrapper "$program" $argument >"$program.log" 2>&1 &
    wait $!
    code=$?
    trap - HUP INT TERM
    tally=$(grep -E '^[^ ]+: [0-9]+ passed, [0-9]+ failed$' "$program.log" | tail -n 1)
    good=$(echo "$tally" | sed -n 's/.*: \([0-9]*\) passed.*/\1/p')
    bad=$(echo "$tally" | sed -n 's/.* \([0-9]*\) failed.*/\1/p')
    if [ $code -ne 0 ] || [ -z "$tally" ]; then
        cat "$program.log"
        [ $code -eq 124 ] && echo "$program: no end after $limit s"
        [ "${bad:-0}" -eq 0 ] && bad=$((${bad:-0} + 1)) && echo "$program: exit code $code"
    fi
    echo "$program: ${good:-0} passed, ${bad:-0} failed"
    echo "${good:-0} ${bad:-0}" >"$program.tally"
    rm -f "$program.log"
}

sum_of() {
    passed=0 failed=0
    for program in "$@"; do
        good=0 bad=1
        if [ -f "$program.tally" ]; then
            read -r good bad <"$program.tally"
            [ "$bad" -ne 0 ] && echo "FAILED: $program"
        else
            echo "FAILED: $program: not built"
        fi
        rm -f "$program.tally"
        passed=$((passed + good)) failed=$((failed + bad))
    done
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}

case "$1" in
--tally) tally_of "$2" ;;
--sum)
    shift
    sum_of "$@"
    ;;
*)
    for program in "$@"; do
        [ ! -x "$program" ] || tally_of "$program"
    done
    sum_of "$@"
    ;;
esac
