#!/bin/sh
# A SLURM of one node on this Debian machine, for tests/analyze/batching/test_batch_slurm.py: installs the packages, writes a configuration
# and starts munged, slurmctld and slurmd by hand, as root. Nothing is started again after a reboot.
#
#     sudo sh tests/analyze/batching/slurm.sh start    # then: python -m pytest tests/analyze/batching/test_batch_slurm.py
#     sudo sh tests/analyze/batching/slurm.sh stop
set -eu

RUN=/run/tracereel-slurm
STATE=/var/lib/tracereel-slurm

stop() {
    for name in slurmd slurmctld munged; do
        if [ -f "$RUN/$name.pid" ]; then
            kill "$(cat "$RUN/$name.pid")" 2>/dev/null || true
            rm -f "$RUN/$name.pid"
        fi
    done
}

start() {
    command -v slurmctld >/dev/null && command -v munged >/dev/null ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
    mkdir -p "$RUN" "$STATE/controller" "$STATE/node" /run/munge /etc/munge /var/log/munge /var/lib/munge /etc/slurm
    [ -s /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 2>/dev/null
    chown -R munge:munge /run/munge /etc/munge /var/log/munge /var/lib/munge
    chmod 400 /etc/munge/munge.key
    chmod 755 /run/munge
    host=$(hostname -s)
    cpus=$(nproc)
    cat >/etc/slurm/slurm.conf <<CONF
ClusterName=tracereel
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.log
StateSaveLocation=$STATE/controller
SlurmdSpoolDir=$STATE/node
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$((cpus > 4 ? cpus : 4)) State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=short Nodes=$host Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=$host MaxTime=INFINITE State=UP PriorityTier=10
CONF
    stop
    # a munged of the system, if one runs, serves as well
    if ! munge -n >/dev/null 2>&1; then
        setpriv --reuid=munge --regid=munge --clear-groups munged --force --pid-file=/run/munge/munged.pid
        cp /run/munge/munged.pid "$RUN/munged.pid"
    fi
    slurmctld
    slurmd
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        if sinfo -h -o %t 2>/dev/null | grep -q idle; then
            sinfo
            return 0
        fi
        sleep 1
    done
    sinfo || true
    tail -n 20 "$STATE"/slurmctld.log "$STATE"/slurmd.log
    echo "the node did not become idle" >&2
    return 1
}

case "${1:-}" in
    start) start ;;
    stop) stop ;;
    *)
        echo "usage: $0 start|stop" >&2
        exit 2
        ;;
esac
