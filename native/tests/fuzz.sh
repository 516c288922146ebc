#!/bin/sh
# Fuzzes each harness for its share of FUZZ_SECONDS; new inputs in build/fuzz/<harness>/corpus, findings beside it as crash-*, timeout-*, oom-*.
cd "$(dirname "$0")" || exit 1
BUILD=${BUILD:-build}
[ $# -gt 0 ] || { echo "no fuzz harnesses"; exit 1; }
share=$((${FUZZ_SECONDS:-1200} / $#))
[ "$share" -gt 0 ] || share=1
failed=0
for name in "$@"; do
    work=$BUILD/fuzz/$name
    mkdir -p "$work/corpus" "corpus/$name"
    options=$(find . -name "$name.c" -exec head -n 1 {} \; | sed -n 's|.*fuzz:\([^;*]*\).*|\1|p')
    echo "$name: $share s"
    # shellcheck disable=SC2086
    if "$work.run" -max_total_time="$share" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$work/" $options \
        "$work/corpus" "corpus/$name" >"$work/log" 2>&1; then
        grep -E 'stat::number_of_executed_units|stat::average_exec_per_sec|cov:' "$work/log" | tail -n 3
    else
        tail -n 60 "$work/log"
        echo "$name: FOUND something; the input is in $work/, replay it with $work.run FILE"
        failed=$((failed + 1))
    fi
done
echo "fuzz: $(($# - failed)) of $# harnesses without a finding"
[ "$failed" -eq 0 ]
