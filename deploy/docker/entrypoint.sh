#!/bin/sh
# Executes steppe, so that it receives signals, after two steps that an image cannot contain: copy compiled kernels to a
# writable directory (the root may be read-only), and read a password from a file.
set -eu
kernels=${KERNELS:-/opt/kernels}
if [ -d "$kernels" ]; then  # the API's image has none
    mkdir -p "$NUMBA_CACHE_DIR"
    cp -Rp "$kernels/." "$NUMBA_CACHE_DIR"
fi
if [ -s "${KAFKA_PASSWORD_FILE:-/dev/null}" ]; then
    STEPPE_KAFKA_PASSWORD=$(cat "$KAFKA_PASSWORD_FILE")
    export STEPPE_KAFKA_PASSWORD
fi
exec steppe "$@"
