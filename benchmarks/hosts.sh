#!/bin/sh
# Hosts on one machine, as network namespaces behind a bridge, their links shaped to RATE; torchrun starts a rank on each.
#
# As root: benchmarks/hosts.sh HOSTS RATE WHAT ...    such as: benchmarks/hosts.sh 4 1gbit -m lss calibrate links.toml --ranks 4
set -eu
[ $# -ge 3 ] || { sed -n 2,4p "$0"; exit 2; }
number=$1 rate=$2; shift 2
case $number in [2-8]) ;; *) echo "$number hosts: 2 to 8 are allowed" >&2; exit 2 ;; esac
hosts=$(seq 0 $((number - 1)))
cleanup() {
  for host in $(seq 0 7); do ip netns del "lss$host" 2>/dev/null || true; done
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
  ip netns exec "lss$host" env GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 torchrun --nnodes "$number" --node-rank "$host" \
    --nproc-per-node 1 --master-addr 10.77.0.10 --master-port 29411 "$@" &
  pids="$pids $!"
done
status=0
for pid in $pids; do wait "$pid" || status=$?; done
exit $status
