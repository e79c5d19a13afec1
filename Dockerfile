# One image for both daemons, unprivileged. The configuration is mounted where PROXYD_CONFIG says, and the token beside it:
#   docker run -v ./site-a.toml:/etc/proxyd/proxyd.toml:ro -v ./token:/etc/proxyd/token:ro -v proxyd-run:/run/proxyd proxyd agent
# Trainers reach the agent through its socket: share the volume /run/proxyd with them. Arenas are passed over the socket as
# descriptors, so no shared /dev/shm is needed; a shared pid namespace is, for the agent to see a trainer die.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
# Where no registry is reachable: --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels, and the wheels mounted there
# (tools/image.sh does that).
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/proxyd
COPY pyproject.toml README.md LICENSE ./
COPY proxyd ./proxyd
COPY client ./client
# Nothing in the image compiles or installs anything later, so pip needn't come along.
RUN /opt/proxyd/bin/pip install --no-cache-dir --disable-pip-version-check '.[daemon,ha]' \
    && /opt/proxyd/bin/pip uninstall -q -y setuptools pip

FROM python:3.11-slim-bookworm
# The ids are fixed so that a volume's owner can be set from outside.
RUN groupadd --gid 7600 proxyd \
    && useradd --uid 7600 --no-log-init --gid proxyd --no-create-home --home-dir / --shell /usr/sbin/nologin proxyd \
    && install -d -o proxyd -g proxyd -m 0755 /run/proxyd \
    && install -d -o root -g proxyd -m 0750 /etc/proxyd
COPY --from=build /opt/proxyd /opt/proxyd
ENV PATH=/opt/proxyd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PROXYD_LOG_FORMAT=json \
    PROXYD_CONFIG=/etc/proxyd/proxyd.toml
USER 7600:7600
VOLUME /run/proxyd
# 7600 coordinator, 7601 peers, 7602 trainers over TCP, 9600 and 9601 metrics
EXPOSE 7600 7601 7602 9600 9601
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 CMD ["proxyd", "healthcheck"]
ENTRYPOINT ["proxyd"]
CMD ["--help"]
