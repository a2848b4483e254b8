#!/usr/bin/env bash
# SPDX-License-Identifier: MIT-0
# Install Slurm on Debian or Ubuntu.
#
# usage: sudo bash slurm/install-slurm.sh
#        bash slurm/install-slurm.sh --controller NAME=ADDRESS \
#            --node NAME=ADDRESS[,KEY=VALUE...]... [--out DIR]
#
# The first makes this machine a cluster of one node and runs a job on it. The second is for several
# machines: it writes the configuration and a key into DIR (slurm-cluster) and prints the commands
# that install Slurm with them. NAME is what `hostname -s` prints on a machine. The KEY=VALUEs are
# what `slurmd -C` prints there, and Gres=gpu:COUNT. Without any, a node is taken to be like this
# machine.
#
# Not installed: drivers of GPUs, accounting (sacct, limits for users). Several machines also
# require a shared folder, equal users and ids, the same time, and open ports between them.
#
# A job whose node is lost is requeued. Jobs of the partition urgent preempt those of main, which
# are requeued, too.
#
# To change settings, edit slurm.conf, then run this or the printed commands again. An existing
# slurm.conf is never overwritten: delete it to have it written anew, as after adding a GPU.
# To uninstall: apt-get purge slurmctld slurmd slurm-client munge
#               rm -r /etc/slurm /var/lib/slurm /var/log/slurm
set -euo pipefail

etc=/etc/slurm
marker='# Written by install-slurm.sh'

die() { echo "error: $*" >&2; exit 1; }

# --- configuration ---
this_machine() {    # CPUs=N ... RealMemory=N [Gres=gpu:N]
    local node memory gpus
    node=$(slurmd -C | sed -n 's/^NodeName=[^ ]* //p') ||
        die "requires slurmd, or the KEY=VALUEs of each --node"
    memory=${node##*RealMemory=}
    memory=${memory%% *}
    # 5 % less: Slurm drains a node that has less memory than configured, as after a kernel update
    node=${node/RealMemory=$memory/RealMemory=$((memory * 95 / 100))}
    gpus=$(find /dev -maxdepth 1 -regex '/dev/nvidia[0-9]+' | wc -l)
    if [ "$gpus" -gt 0 ]; then node+=" Gres=gpu:$gpus"; fi
    echo "$node"
}

add_node() {        # add_node NAME=ADDRESS 'KEY=VALUE KEY=VALUE...'
    [[ $2 =~ CPUs=([1-9][0-9]*).*RealMemory=([1-9][0-9]*) ]] ||
        die "--node $1 requires CPUs= and RealMemory=, as \`slurmd -C\` prints them"
    # Without a default, a job that requests no memory gets the whole node's.
    local share=$((BASH_REMATCH[2] / BASH_REMATCH[1]))
    if [ "$memory_per_cpu" = 0 ] || [ "$share" -lt "$memory_per_cpu" ]; then
        memory_per_cpu=$share
    fi
    nodes+="NodeName=${1%%=*} NodeAddr=${1#*=} $2 State=UNKNOWN"$'\n'
    if [[ $2 =~ Gres=gpu:([0-9]+) ]]; then
        local last=$((BASH_REMATCH[1] - 1))
        gpus+="NodeName=${1%%=*} Name=gpu File=/dev/nvidia[0-$last]"$'\n'
    fi
    hosts+=("root@${1#*=}")
}

write_configuration() {     # write_configuration DIR
    local file version proctrack=linuxproc task=task/affinity
    for file in "$1"/{slurm,gres,cgroup}.conf; do
        [ ! -e "$file" ] || [ "$(head -n 1 "$file")" = "$marker" ] ||
            die "$file exists, and was not written by this script: move it away first"
    done
    if [ -e "$1/slurm.conf" ]; then
        echo "keeping the existing $1/slurm.conf"
        return
    fi
    version=$(slurmd -V 2>/dev/null | sed -E 's/.* ([0-9]+)\.([0-9]+).*/\1\2/') || version=2205
    # slurmd asks systemd for its cgroups (v2). Slurm 21.08 of Ubuntu 22.04 knows only v1, most
    # containers have none.
    if [ -d /run/systemd/system ] && [ -e /sys/fs/cgroup/cgroup.controllers ] &&
            [ "$version" -ge 2205 ]; then
        proctrack=cgroup
        task+=,task/cgroup
        printf '%s\n' "$marker" ConstrainCores=yes ConstrainRAMSpace=yes ConstrainDevices=yes \
            >"$1/cgroup.conf"
    elif [ "$version" -ge 2405 ]; then
        printf '%s\n' "$marker" CgroupPlugin=disabled >"$1/cgroup.conf"
    else    # slurmd loads a plugin also where none is used, and only v1's needs nothing
        printf '%s\n' "$marker" CgroupPlugin=cgroup/v1 >"$1/cgroup.conf"
    fi
    printf '%s\n' "$marker" "$gpus" >"$1/gres.conf"
    cat >"$1/slurm.conf" <<END
$marker
ClusterName=cluster
SlurmctldHost=${controller%%=*}(${controller#*=})
SlurmUser=slurm
ReturnToService=2
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$memory_per_cpu
ProctrackType=proctrack/$proctrack
TaskPlugin=$task
GresTypes=gpu
$nodes
# Jobs of a higher PriorityTier preempt those of a lower one, which are requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
END
    chmod 644 "$1"/{slurm,gres,cgroup}.conf
}

# --- one machine ---
install_here() {
    [ "$(id -u)" = 0 ] || die "requires root: sudo bash $0"
    if ! type munged slurmctld slurmd srun >/dev/null 2>&1; then
        apt-get update
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            munge slurmctld slurmd slurm-client
    fi
    controller=$(hostname -s)=127.0.0.1
    add_node "$controller" "$(this_machine)"
    write_configuration $etc
    for daemon in munge slurmctld slurmd; do
        service $daemon restart
    done
    for _ in {1..30}; do
        if scontrol ping >/dev/null 2>&1; then
            break
        fi
        sleep 1
    done
    name=$(timeout 60 srun hostname) ||
        die "the job did not run: see sinfo -R and the logs in /var/log/slurm"
    echo "srun hostname: $name"
    sinfo
}

# --- several machines ---
commands() {        # commands DAEMON HOST...: what installs the daemon on the hosts
    cat <<END
for host in ${*:2}; do
    ssh \$host 'apt-get update && apt-get install -y munge $1 slurm-client'
    scp '$out'/*.conf \$host:$etc/
    scp '$out/munge.key' \$host:/etc/munge/
    ssh \$host 'chown munge: /etc/munge/munge.key && service munge restart && service $1 restart'
done
END
}

write_cluster() {
    mkdir -p "$out"
    write_configuration "$out"
    if [ ! -e "$out/munge.key" ]; then
        (umask 077 && head -c 128 /dev/urandom >"$out/munge.key")
    fi
    cat <<END
# What is left to you, on all machines:
# - a shared folder for the repository and the jobs' output, at the same path
# - the same users with the same ids (id -u)
# - the same time (timedatectl)
# - open ports between them: a firewall must not be in the way
# - drivers of the GPUs (nvidia-smi)
# - accounting (slurmdbd), if you want sacct or limits for users
#
# These commands replace slurm.conf and the munge key there. They require ssh to root:
END
    commands slurmctld "root@${controller#*=}"
    commands slurmd "${hosts[@]}"
    echo "# Then, on any of them: srun --nodes=${#hosts[@]} hostname"
}

controller=''
out=slurm-cluster
nodes=''
gpus=''
memory_per_cpu=0
hosts=()
while [ $# -gt 1 ]; do
    case $1 in
        --controller) controller=$2 ;;
        --node)
            node=${2%%,*}
            keys=${2#"$node"}
            keys=${keys:-$(this_machine)}
            add_node "$node" "${keys//,/ }"
            ;;
        --out) out=$2 ;;
        *) break ;;
    esac
    shift 2
done
[ $# = 0 ] || die "unknown or incomplete option $1: see the first lines of $0"
if [ -z "$controller" ] && [ ${#hosts[@]} = 0 ]; then
    install_here
else
    [[ $controller == *=* && ${#hosts[@]} -gt 0 ]] ||
        die "requires --controller NAME=ADDRESS and --node NAME=ADDRESS"
    write_cluster
fi
