#!/bin/sh
# Make the secrets of a deployment, once: deploy/make-secrets.sh DIRECTORY [DATABASE_HOST]
# What is there already is never replaced.
set -eu

directory=${1:?the directory to make, such as deploy/secrets}
database=${2:-postgres}

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

mkdir -m 700 "$directory"  # closed to other users, so that the files in it may be read by the containers' users
cd "$directory"
umask 022
random > postgres_password
random > grafana_password
printf 'rk-client-%s' "$(random)" > client_key
head -c 32 /dev/urandom > signing.key
cat > riacho.toml <<TOML
database_url = "postgresql+psycopg://riacho:$(cat postgres_password)@$database/riacho"
admin_key = "rk-admin-$(random)"
client_key = "$(cat client_key)"

# Settings of the log's TLS and SASL, where it has them, and the learner's [learner] table go here too.
TOML
echo "made in $directory: $(ls | tr '\n' ' ')"
