#!/usr/bin/env bash
# A real SLURM of two nodes on this machine, beside whatever is installed here: the configuration,
# state, ports and keys are its own. Without systemd, cgroups and accounting; for root.
#
#   tests/cluster/slurm_up.sh up DIR        SLURM_CONF=DIR/slurm.conf is then how to reach it
#   tests/cluster/slurm_up.sh down DIR      ends its jobs and daemons, and what `up` wrote outside of DIR
#
# Wants the Debian packages slurm-wlm and munge; nodes are called PREFIX1 and PREFIX2 in /etc/hosts.
set -euo pipefail

(($# == 2)) && [[ $1 == up || $1 == down ]] || {
    echo "usage: tests/cluster/slurm_up.sh up|down DIR" >&2
    exit 2
}
dir=$(realpath -m -- "$2")
prefix=meshtrain-n nodes=2
mark="# $dir"
export SLURM_CONF=$dir/slurm.conf

# Prints so many ports that are free now.
free_ports() {
    python3 - "$1" <<'END'
import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in held))
END
}

# Rewrites /etc/hosts in place, as a container may have it mounted: without our line, and then $@.
write_hosts() {
    local kept
    kept=$(grep -vF -- "$mark" /etc/hosts || true)
    printf '%s\n' "$kept" "$@" >/etc/hosts
}

# Waits until the command succeeds, at most $1 seconds.
wait_for() {
    local until=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < until)) || return 1
        sleep 0.2
    done
}

all_idle() {
    [[ $(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l) == "$nodes" ]]
}

no_jobs() {
    local jobs
    jobs=$(squeue -h 2>/dev/null) && [[ -z $jobs ]]
}

# Whether a daemon has ended; its parent may leave it a zombie.
gone() {
    [[ ! -r /proc/$1/stat || $(<"/proc/$1/stat") == *") Z "* ]]
}

up() {
    local ports host number
    mkdir -p "$dir"/{state,spool,log}
    chmod 755 "$dir"
    read -ra ports < <(free_ports $((1 + nodes)))
    host=$(hostname -s)
    cat >"$SLURM_CONF" <<END
ClusterName=meshtrain
FirstJobId=$((RANDOM % 4000 + 1))
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
END
    for ((number = 1; number <= nodes; number++)); do
        echo "NodeName=$prefix$number NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[number]}" \
            "CPUs=16 RealMemory=4000 State=UNKNOWN"
        mkdir -p "$dir/spool/$prefix$number"
    done >>"$SLURM_CONF"
    echo "PartitionName=debug Nodes=ALL Default=YES MaxTime=01:00:00 State=UP" >>"$SLURM_CONF"
    write_hosts "$(printf '127.0.0.1'; printf " $prefix%s" $(seq "$nodes")) $mark"

    head -c 1024 /dev/urandom >"$dir/munge.key"
    chmod 600 "$dir/munge.key"
    munged --force --socket="$dir/munge.socket" --key-file="$dir/munge.key" \
        --pid-file="$dir/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
    slurmctld
    for ((number = 1; number <= nodes; number++)); do
        slurmd -N "$prefix$number"
    done
    wait_for 20 all_idle || {
        sinfo -N >&2 || true
        tail -n 20 "$dir"/log/*.log >&2
        return 1
    }
}

down() {
    local file pid
    if [[ -f $SLURM_CONF ]] && timeout 10 scancel --user=root 2>/dev/null; then
        wait_for 20 no_jobs || echo "slurm_up: jobs do not end" >&2
    fi
    for file in "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/munged.pid"; do
        [[ -f $file ]] || continue
        pid=$(<"$file")
        kill "$pid" 2>/dev/null || continue
        wait_for 10 gone "$pid" || kill -9 "$pid"
    done
    write_hosts
}

"$1"
