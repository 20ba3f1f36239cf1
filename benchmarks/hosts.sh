#!/bin/sh
# Four hosts on one machine, as network namespaces behind a bridge, with links shaped to RATE; runs a command on each.
#
# As root: benchmarks/hosts.sh RATE COMMAND ...    such as: benchmarks/hosts.sh 1gbit python -m lss calibrate links.toml --ranks 4
set -eu
rate=$1; shift
hosts="0 1 2 3"
cleanup() {
  for host in $hosts; do ip netns del "lss$host" 2>/dev/null || true; done
  ip link del lssbridge 2>/dev/null || true
}
trap cleanup EXIT
cleanup
ip link add lssbridge type bridge
ip link set lssbridge up
for host in $hosts; do
  ip netns add "lss$host"
  ip link add "lssout$host" type veth peer name eth0 netns "lss$host"
  ip link set "lssout$host" master lssbridge up
  ip netns exec "lss$host" ip link set lo up
  ip netns exec "lss$host" ip addr add "10.77.0.1$host/24" dev eth0
  ip netns exec "lss$host" ip link set eth0 up
  ip netns exec "lss$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 400ms
  tc qdisc add dev "lssout$host" root tbf rate "$rate" burst 256kb latency 400ms
done
pids=""
for host in $hosts; do
  ip netns exec "lss$host" env RANK="$host" WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.10 \
    MASTER_PORT=29411 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 "$@" &
  pids="$pids $!"
done
status=0
for pid in $pids; do wait "$pid" || status=$?; done
exit $status
