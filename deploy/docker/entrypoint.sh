#!/bin/sh
# Becomes steppe, so that signals reach it, after two things that an image cannot hold: compiled kernels where numba may
# write, which a read-only root is not, and a password from a file.
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
