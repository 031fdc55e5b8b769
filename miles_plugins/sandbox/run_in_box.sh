# Runs one command in a remote box: output capped, limited in time, killed with all that it started.
# POSIX sh with base64, grep, head, ls, mkdir, mkfifo, rm, sleep, tail, tee and wc; needs /proc.
#   run JOB MARK SECONDS CAP DIRECTORY STDIN ARGV...   answers in lines that remote_box.py reads
#   kill JOB MARK                                      kills everything that a `run` has started
# A process belongs to a command when MILES_JOB=MARK is in its environment, when it descends from
# one, or when it holds the command's output open. What a command leaves in the background goes on
# after it, as on any machine.

# Pids with the mark, then what descends from them even with another environment.
members() {
  found=
  for file in $(grep -lF "MILES_JOB=$mark" /proc/[0-9]*/environ 2>/dev/null); do
    file=${file#/proc/}
    found="$found ${file%/environ}"
  done
  grown=$found
  while [ -n "$grown" ]; do
    grown=
    for file in /proc/[0-9]*/stat; do
      { read -r line <"$file"; } 2>/dev/null || continue
      child=${line%% *}
      set -- ${line##*) }
      case " $found " in *" $child "*) continue ;; esac
      case $1 in Z | X) continue ;; esac
      case " $found " in *" $2 "*) grown="$grown $child" found="$found $child" ;; esac
    done
  done
}

# A process that shed the mark and its parents still shows by the output it can write to.
holders() {
  found=
  for file in $(ls -l /proc/[0-9]*/fd/* 2>/dev/null | grep '^l-wx' |
    grep -F -e " -> $job/1" -e " -> $job/2"); do
    case $file in /proc/*) file=${file#/proc/} found="$found ${file%%/*}" ;; esac
  done
}

# Killing until nobody is left, because what is killed may be forking.
reap() {
  passes=0
  while [ "$passes" -lt 50 ]; do
    members
    [ -n "$found" ] || holders
    [ -n "$found" ] || return 0
    kill -KILL $found 2>/dev/null
    passes=$((passes + 1))
    [ "$passes" -lt 3 ] || sleep 0.1
  done
}

# In the background: wait, then end the command; a TERM, whenever it comes, ends the waiting. KILL,
# for between fork and exec a child still has the shell's trap, which would swallow a TERM.
limit() {
  over='' waiting=''
  trap 'over=1; kill -9 $waiting' TERM
  sleep "$1" &
  waiting=$!
  [ -z "$over" ] || kill -9 "$waiting"
  wait "$waiting"
  [ -z "$over" ] || exit 0
  : >"$job/late"
  reap
}

# A stream's beginning into a file, as it comes; its end into another, when it has ended.
keep() {
  (ulimit -c 0; ulimit -f "$((cap / 512 + 1))"; trap '' XFSZ; exec tee "$1") |
    tail -c "$((cap / 2))" >"$1.end"
  : >"$1.done"
}

# A stream in base64, closed by a dot; of more than CAP bytes half from its beginning, half from its
# end, which has a dot of its own.
tell() {
  if [ "$(wc -c <"$1")" -le "$cap" ]; then
    base64 <"$1" && echo . && echo . && return
  fi
  head -c "$((cap / 2))" "$1" | base64
  echo .
  if [ -e "$1.done" ]; then base64 <"$1.end"; else tail -c "$((cap / 2))" "$1" | base64; fi
  echo .
}

run() {
  job=$1 mark=$2 seconds=$3 cap=$4 place=$5 feed=$6
  shift 6
  mkdir -m 700 "$job" && mkfifo "$job/1" "$job/2" || exit 125
  exec 2>/dev/null
  # a subshell first, whose only output is /dev/null: a shell keeps a copy of what it redirects for
  # a function, and the answer's end would be held open by it
  (keep "$job/out" <"$job/1") >/dev/null &
  (keep "$job/err" <"$job/2") >/dev/null &
  (limit "$seconds") </dev/null >/dev/null &
  clock=$!
  (cd "$place" && export MILES_JOB="$mark" && exec "$@") >"$job/1" 2>"$job/2" <"$feed"
  code=$?
  kill "$clock"
  wait "$clock"
  late=0
  if [ -e "$job/late" ]; then late=1 && reap; fi
  # both readers are done at once, unless something in the background still holds the streams
  turns=0
  until [ -e "$job/out.done" ] && [ -e "$job/err.done" ] || [ "$turns" -eq 15 ]; do
    sleep 0.02
    turns=$((turns + 1))
  done
  echo "miles:$mark $code $late"
  tell "$job/out"
  tell "$job/err"
  rm -rf "$job" "$job".*
}

case $1 in
  kill) job=$2 mark=$3 && reap ;;
  run) shift && run "$@" ;;
esac
