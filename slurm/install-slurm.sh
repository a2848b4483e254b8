#!/usr/bin/env bash
# Slurm on Debian or Ubuntu, with or without systemd, cgroup v1 or v2. As root:
#
#   install-slurm.sh            make this machine a one-node cluster, and prove it by running a job
#   install-slurm.sh --remove   stop it and delete every file this script wrote
#   install-slurm.sh --controller NAME[=ADDRESS] --node NAME[=ADDRESS][,KEY=VALUE…]… [--out FOLDER]
#                               several machines: write the configuration and a key into FOLDER
#                               (slurm-cluster) and print the commands that bring them to every machine
#   install-slurm.sh --print-config [--controller …] [--node …]…      only print slurm.conf
#
# Options: --set KEY=VALUE               a line of slurm.conf, in place of this script's own ("--set KEY=": none)
#          --partition 'NAME KEY=VALUE…' in place of the one partition, `main`; may be repeated
#          --cgroup v1|v2|none           when the nodes differ from this machine
# A NAME is what `hostname -s` says on that machine. A node's KEY=VALUEs are what `slurmd -C` prints there, and
# Gres=gpu:COUNT; a node without any is taken to be like this machine.
# Running it again is harmless. A configuration that this script did not write is never touched.
set -euo pipefail

marker='# Written by install-slurm.sh, which overwrites and removes only files that begin with this line.'
etc=/etc/slurm
files=(slurm.conf gres.conf cgroup.conf)
packages=(munge slurmctld slurmd slurm-client procps)

die() { echo "install-slurm.sh: $*" >&2; exit 1; }

# ---- what this machine has ----------------------------------------------------------------------------------

gpus() { find /dev -maxdepth 1 -regex '/dev/nvidia[0-9]+' -printf '%f\n' | sed 's/nvidia//' | sort -n | paste -sd,; }

this_machine() {
    command -v slurmd >/dev/null || die "slurmd, which knows this machine's hardware, is missing: apt-get install slurmd"
    local spec count memory
    spec=$(slurmd -C | sed -n 's/^NodeName=[^ ]* //p')
    [ "$spec" ] || die "\`slurmd -C\` does not say what this machine has"
    memory=$(value RealMemory "$spec")
    # 5 % less: a node that comes back from a new kernel with less memory than it promised would be drained
    spec=${spec/RealMemory=$memory/RealMemory=$((memory * 95 / 100))}
    count=$(gpus | tr ',' '\n' | grep -c . || true)
    if [ "$count" -gt 0 ]; then spec+=" Gres=gpu:$count"; fi
    echo "$spec"
}

version() {     # 22.05.8: 2205
    if command -v slurmd >/dev/null; then slurmd -V | sed -E 's/.* ([0-9]+)\.([0-9]+).*/\1\2/'; else echo 2205; fi
}

cgroups() {     # v1 and v2 where slurmd can use them, none in most containers
    if [ -w /sys/fs/cgroup/freezer ] && [ -w /sys/fs/cgroup/memory ] && [ -w /sys/fs/cgroup/cpuset ]; then
        echo v1
    elif [ -d /run/systemd/system ] && grep -qs memory /sys/fs/cgroup/cgroup.controllers &&
        [ "$(version)" -ge 2205 ]; then
        echo v2     # slurmd asks systemd, over D-Bus, for its part of the tree; 21.08 (Ubuntu 22.04) could not yet
    else
        echo none
    fi
}

# ---- the configuration --------------------------------------------------------------------------------------

slurm_conf() {
    local text node spec set share memory_per_cpu=''
    text="ClusterName=cluster
SlurmctldHost=${controller%%=*}(${controller#*=})
SlurmUser=slurm
AuthType=auth/munge
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
JobAcctGatherType=jobacct_gather/linux"
    case $cgroup in
        none) text+=$'\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/affinity' ;;
        *) text+=$'\nProctrackType=proctrack/cgroup\nTaskPlugin=task/affinity,task/cgroup' ;;
    esac
    if [[ "${specs[*]}" == *Gres=gpu* ]]; then text+=$'\nGresTypes=gpu'; fi
    for spec in "${specs[@]}"; do   # without this a job that asks for no memory gets all of it, and so the whole node
        share=$(($(value RealMemory "$spec") / $(value CPUs "$spec")))
        if [ -z "$memory_per_cpu" ] || [ "$share" -lt "$memory_per_cpu" ]; then memory_per_cpu=$share; fi
    done
    text+=$'\n'"DefMemPerCPU=$memory_per_cpu"
    for set in "${sets[@]}"; do
        text=$(grep -vi "^${set%%=*}=" <<<"$text")
        if [ -n "${set#*=}" ]; then text+=$'\n'$set; fi
    done
    echo "$marker"
    echo "$text"
    for node in "${!names[@]}"; do
        echo "NodeName=${names[node]} NodeAddr=${addresses[node]} ${specs[node]} State=UNKNOWN"
    done
    printf 'PartitionName=%s\n' "${partitions[@]}"
}

value() { sed -nE "s/(.* )?$1=([^ ]*).*/\2/p" <<<"$2"; }    # value KEY 'KEY=VALUE KEY=VALUE…'

gres_conf() {
    local node gres type count list
    echo "$marker"
    for node in "${!names[@]}"; do
        if [[ "${specs[node]}" != *Gres=gpu* ]]; then continue; fi
        gres=$(value Gres "${specs[node]}")         # gpu:COUNT or gpu:TYPE:COUNT
        count=${gres##*:}
        type=${gres#gpu}; type=${type%"$count"}; type=${type//:/}
        list=$(seq -s, 0 $((count - 1)))
        if [ -n "${local_gpus:-}" ]; then list=$local_gpus; fi
        echo "NodeName=${names[node]} Name=gpu ${type:+Type=$type }File=/dev/nvidia[$list]"
    done
}

cgroup_conf() {
    echo "$marker"
    case $cgroup in
        # slurmd loads a plugin all the same; before `disabled` came in 24.05, v1 was the one that does nothing unasked
        none) if [ "$(version)" -ge 2405 ]; then echo CgroupPlugin=disabled; else echo CgroupPlugin=cgroup/v1; fi ;;
        *) printf '%s\n' "CgroupPlugin=cgroup/$cgroup" ConstrainCores=yes ConstrainRAMSpace=yes ConstrainDevices=yes ;;
    esac
}

write_configuration() {     # write_configuration FOLDER [COMMAND…], which runs before a file is changed
    local file text
    for file in "${files[@]}"; do
        if [ "$file" = gres.conf ] && [[ "${specs[*]}" != *Gres=gpu* ]]; then rm -f "$1/$file"; continue; fi
        text=$("${file/./_}")
        if [ "$(cat "$1/$file" 2>/dev/null)" = "$text" ]; then continue; fi
        "${@:2}"
        echo "$text" >"$1/$file"
        chmod 644 "$1/$file"
    done
}

refuse_foreign() {      # refuse_foreign FOLDER
    local file
    for file in "${files[@]}"; do
        if [ -e "$1/$file" ] && ! ours "$1/$file"; then
            die "$1/$file was not written by this script: move it away first, or keep it and do without this script"
        fi
    done
}

ours() { [ "$(head -n 1 "$1" 2>/dev/null)" = "$marker" ]; }

# ---- one machine --------------------------------------------------------------------------------------------

# In this namespace only: a slurmd in a container of this machine's is not this machine's.
running() { pgrep --ns $$ --nslist pid --exact "$1" >/dev/null; }

stop() {
    local daemon
    for daemon; do
        if [ -d /run/systemd/system ]; then
            systemctl stop "${daemon/munged/munge}"
        else
            pkill --ns $$ --nslist pid --exact "$daemon" || true
        fi
        for _ in {1..150}; do running "$daemon" || continue 2; sleep 0.1; done
        die "$daemon does not stop: see its log in /var/log"
    done
}

start() {
    local daemon
    for daemon; do running "$daemon" || service "${daemon/munged/munge}" start >/dev/null 2>&1 || true; done
}

wait_until_idle() {
    local daemon log state='' deadline=$((SECONDS + 60))
    while [ $SECONDS -lt $deadline ]; do
        sleep 0.2
        for daemon in munged slurmctld slurmd; do
            log=/var/log/slurm/$daemon.log
            if [ $daemon = munged ]; then log=/var/log/munge/munged.log; fi
            running $daemon || die "$daemon ended: $(grep -siE 'fatal|error' $log | tail -n 1 || true) (see $log)"
        done
        state=$(timeout 10 sinfo --noheader --nodes="${names[0]}" --format=%t 2>/dev/null | head -n 1 || true)
        case $state in
            idle | mix | alloc) return ;;
            drain* | drng* | inval*) die "the node is out of use ($(sinfo -hRo %E | head -n 1)): mend that, then" \
                "scontrol update nodename=${names[0]} state=resume" ;;
        esac
    done
    die "after a minute the node is '$state', not idle: see /var/log/slurm/slurmd.log and slurmctld.log"
}

install_here() {
    refuse_foreign $etc
    [ -n "$(hostname -I)" ] || die "Slurm needs a network address besides 127.0.0.1: ip link add br0 type bridge;" \
        "ip addr add 192.0.2.1/32 dev br0; ip link set br0 up"
    if [ "$(dpkg-query -Wf '${Status}\n' "${packages[@]}" 2>/dev/null | grep -c ' ok installed$')" != ${#packages[@]} ]; then
        command -v apt-get >/dev/null || die "there is no apt-get here: this script is for Debian and Ubuntu"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}"
    fi
    describe_this_machine
    cgroup=${cgroup:-$(cgroups)}
    write_configuration $etc stop slurmd slurmctld
    if [ ! -e /etc/munge/munge.key ]; then
        (umask 077 && head -c 128 /dev/urandom >/etc/munge/munge.key)
        chown munge: /etc/munge/munge.key
    fi
    install -d -o slurm -g slurm /var/log/slurm /var/lib/slurm /var/lib/slurm/slurmctld
    start munged slurmctld slurmd
    wait_until_idle
    sinfo
    if [ "$(sinfo --noheader --format=%t)" = idle ]; then
        echo "srun hostname: $(timeout 30 srun --immediate=20 hostname)"
    else
        echo "The node is at work, so no test job was run."
    fi
}

at_work() {
    if running slurmctld; then
        [ "$(timeout 10 squeue --noheader --states=PD,CF,R,S 2>/dev/null)" ]
    else
        running slurmstepd
    fi
}

remove_here() {
    local file
    refuse_foreign $etc
    if ! ours $etc/slurm.conf; then echo "There is no configuration of this script's in $etc."; return; fi
    if at_work; then die "there are jobs: let them end, or scancel them"; fi
    stop slurmd slurmctld munged
    for file in "${files[@]}"; do rm -f "$etc/$file"; done
    find /var/lib/slurm/slurmctld /var/lib/slurm/slurmd -mindepth 1 -delete 2>/dev/null || true
    rm -f /var/log/slurm/slurmctld.log /var/log/slurm/slurmd.log /run/slurmctld.pid /run/slurmd.pid /run/lock/slurm
    echo "Removed. The packages stay; apt-get purge munge slurmctld slurmd slurm-client removes them too."
}

# ---- several machines ---------------------------------------------------------------------------------------

write_cluster() {
    local i address role machines=("$controller")
    mkdir -p "$out"
    refuse_foreign "$out"
    write_configuration "$out"
    if [ ! -e "$out/munge.key" ]; then (umask 077 && head -c 128 /dev/urandom >"$out/munge.key"); fi
    cat <<END
$out/ holds the configuration, and the key that lets a machine into the cluster. All machines need the same users
with the same numbers, the same time of day, a shared folder for the jobs, and no firewall between them. From here,
as one who may ssh to root (what a file replaces is kept as FILE~):

END
    for i in "${!names[@]}"; do
        if [ "${names[i]}" != "${controller%%=*}" ]; then machines+=("${names[i]}=${addresses[i]}"); fi
    done
    for i in "${!machines[@]}"; do
        address=${machines[i]#*=}
        role=slurmd
        if [ "$i" = 0 ]; then
            role=slurmctld
            if [[ " ${names[*]} " == *" ${controller%%=*} "* ]]; then role+=' slurmd'; fi
        fi
        cat <<END
# ${machines[i]%%=*}: $role
ssh root@$address 'rm -rf /root/slurm-cluster'
scp -pr '$out' root@$address:/root/slurm-cluster
ssh root@$address 'set -e
  trap "rm -r /root/slurm-cluster" EXIT
  apt-get update
  apt-get install -y munge $role slurm-client
  install -b -o munge -g munge -m 400 /root/slurm-cluster/munge.key /etc/munge/munge.key
  install -b -m 644 /root/slurm-cluster/*.conf $etc/
  for daemon in munge $role; do service \$daemon restart; done'

END
    done
    echo "Then, on any of them: sinfo; srun --nodes=${#names[@]} hostname"
}

# ---- the command line ---------------------------------------------------------------------------------------

describe_this_machine() {       # --node was not given
    local name spec
    name=$(hostname -s)
    spec=$(this_machine)
    names=("$name") addresses=(127.0.0.1) specs=("$spec")
    local_gpus=$(gpus)
    controller=${controller:-$name=127.0.0.1}
}

action=install controller='' out=slurm-cluster cgroup=
names=() addresses=() specs=() sets=() partitions=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        --remove) action=remove; shift; continue ;;
        --print-config) action=print; shift; continue ;;
        --controller | --node | --set | --partition | --out | --cgroup) [ $# -gt 1 ] || die "$1 needs a value" ;;
        *) die "there is no option $1: see --help" ;;
    esac
    case $1 in
        --controller) controller=$2; [[ $2 == *=* ]] || controller=$2=$2 ;;
        --node)
            node=${2%%,*}
            names+=("${node%%=*}") addresses+=("${node#*=}")
            specs+=("$(sed 's/^[^,]*,*//; s/,/ /g' <<<"$2")") ;;
        --set) [[ $2 == *=* ]] || die "--set wants KEY=VALUE, not $2"; sets+=("$2") ;;
        --partition) partitions+=("$2") ;;
        --out) out=$2 ;;
        --cgroup) [[ $2 == @(v1|v2|none) ]] || die "--cgroup is v1, v2 or none, not $2"; cgroup=$2 ;;
    esac
    shift 2
done
[ ${#partitions[@]} -gt 0 ] || partitions=('main Nodes=ALL Default=YES MaxTime=INFINITE State=UP')
if [ "$action" = install ] && [ "$controller${names[*]}" ]; then action=cluster; fi
if [[ $action == cluster || "$action$controller${names[*]}" == print?* ]] && { [ -z "$controller" ] || [ ${#names[@]} = 0 ]; }; then
    die "several machines need --controller NAME=ADDRESS and a --node NAME=ADDRESS for each node"
fi
for i in "${!names[@]}"; do
    specs[i]=${specs[i]:-$(this_machine)}
    if [[ ! "$(value CPUs "${specs[i]}") $(value RealMemory "${specs[i]}")" =~ ^[1-9][0-9]*\ [1-9][0-9]*$ ]]; then
        die "node ${names[i]} lacks a number in CPUs= or RealMemory=: give it what \`slurmd -C\` prints there, with commas between"
    fi
done
if [[ $action == @(install|remove) ]] && [ "$(id -u)" != 0 ]; then die "only root may: sudo bash $0 …"; fi

case $action in
    print) [ ${#names[@]} -gt 0 ] || describe_this_machine; cgroup=${cgroup:-$(cgroups)}; slurm_conf ;;
    cluster) cgroup=${cgroup:-$(cgroups)}; write_cluster ;;
    install) install_here ;;
    remove) remove_here ;;
esac
