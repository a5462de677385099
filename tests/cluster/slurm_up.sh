#!/usr/bin/env bash
# Starts a real SLURM with two nodes on this machine. It has its own configuration, state, ports and keys,
# so it does not disturb another SLURM. It uses no systemd, cgroups or accounting; run it as root.
#
#   tests/cluster/slurm_up.sh up DIR        then set SLURM_CONF=DIR/slurm.conf to use it
#   tests/cluster/slurm_up.sh down DIR      ends its jobs and daemons, and removes its line in /etc/hosts
#
# Needs the Debian packages slurm-wlm and munge; `up` adds the nodes meshtrain-n1 and -n2 to /etc/hosts.
set -euo pipefail

(($# == 2)) && [[ $1 == up || $1 == down ]] || {
    echo "usage: tests/cluster/slurm_up.sh up|down DIR" >&2
    exit 2
}
dir=$(realpath -m -- "$2")
prefix=meshtrain-n nodes=2
mark="# $dir"
export SLURM_CONF=$dir/slurm.conf

# Prints $1 free ports.
free_ports() {
    python3 - "$1" <<'END'
import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in held))
END
}

# Replaces our line in /etc/hosts by $@; in place, because a container may have the file mounted.
write_hosts() {
    local others
    others=$(grep -vF -- "$mark" /etc/hosts || true)
    printf '%s\n' "$others" "$@" >/etc/hosts
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

# Succeeds if a daemon has ended; it may remain as a zombie.
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
        wait_for 20 no_jobs || echo "slurm_up: some jobs do not end" >&2
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
