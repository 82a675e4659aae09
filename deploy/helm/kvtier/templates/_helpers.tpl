{{- define "kvtier.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvtier.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvtier.labels" -}}
{{ include "kvtier.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Converts a quantity to Mi. values.schema.json allows only Mi, Gi and Ti. */}}
{{- define "kvtier.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . }}{{ mul $number 1048576 }}{{ else if hasSuffix "Gi" . }}{{ mul $number 1024 }}{{ else }}{{ $number }}{{ end }}
{{- end }}

{{- define "kvtier.check" -}}
{{- $region := include "kvtier.mebibytes" .Values.regionSize | int64 -}}
{{- $limit := include "kvtier.mebibytes" .Values.resources.limits.memory | int64 -}}
{{- if lt $limit (add $region 1024) -}}
{{- fail (printf "resources.limits.memory (%s) must exceed regionSize (%s) by 1Gi or more, because the region counts against the limit" .Values.resources.limits.memory .Values.regionSize) -}}
{{- end -}}
{{- if and .Values.tcp.enabled (not .Values.tcp.insecure) (not (hasKey .Values.config "tls")) -}}
{{- fail "tcp.enabled: without config.tls the port is unencrypted, and every peer that reaches the port may connect; set config.tls, or tcp.insecure=true if this is intended" -}}
{{- end -}}
{{- $auth := .Values.config.auth | default dict }}{{ $tls := .Values.config.tls | default dict -}}
{{- if and .Values.tcp.enabled (not .Values.tcp.insecure) (not $auth.tokens) (not $tls.client_ca) -}}
{{- fail "tcp.enabled: clients are not authenticated; set config.auth.tokens or config.tls.client_ca, or tcp.insecure=true" -}}
{{- end -}}
{{- if and (eq .Values.probes.type "grpc") (not .Values.tcp.enabled) -}}
{{- fail "probes.type=grpc needs tcp.enabled, because the kubelet cannot probe a Unix socket" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled $auth.metrics (not .Values.metrics.serviceMonitor.authorization) -}}
{{- fail "config.auth.metrics: scrapes need a token; set metrics.serviceMonitor.authorization to the token's secret" -}}
{{- end -}}
{{- range .Values.config.tiers | default list -}}
{{- if regexMatch "://[^/]*@" ((.options | default dict).url | default "") -}}
{{- fail "config.tiers: a url contains a user or a password, which a ConfigMap must not have; use options.username and options.password_file, and a secret under extraVolumes" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.data.type "none" -}}
{{- range .Values.config.tiers | default list -}}
{{- if has .type (list "lmdb" "disk") -}}
{{- fail (printf "data.type=none cannot be combined with a tier of type %s in config.tiers, which needs storage" .type) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The part of kvtier.toml that the chart sets; `config` adds the rest. */}}
{{- define "kvtier.config" -}}
{{- $listen := list (printf "unix:%s/kvtier.sock" .Values.socketDirectory) -}}
{{- if .Values.tcp.enabled }}{{ $listen = append $listen (printf "0.0.0.0:%d" (int .Values.tcp.port)) }}{{ end -}}
listen = {{ $listen | toJson }}
region_size = {{ .Values.regionSize | quote }}
data_dir = "/var/lib/kvtier"
metrics = "0.0.0.0:{{ .Values.metrics.port }}"
{{- if and .Values.tcp.enabled .Values.tcp.insecure }}
insecure = true
{{- end }}
{{- if and (eq .Values.data.type "none") (not (hasKey .Values.config "tiers")) }}
tiers = []
{{- end }}
{{- end }}

{{- define "kvtier.probe" -}}
{{- if eq .Values.probes.type "http" }}
httpGet:
  path: /healthz
  port: metrics
{{- else if eq .Values.probes.type "grpc" }}
grpc:
  port: {{ .Values.tcp.port }}
{{- else }}
exec:
  command: [kvtier, status, --timeout, "3"]
{{- end }}
timeoutSeconds: 5
{{- end }}

{{/* Writes a value as TOML with inline tables. toToml does not work, because helm treats every number
as a float, and kvtier does not accept 4096.0 as an integer. */}}
{{- define "kvtier.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }}, {{ end }}{{ $key | toJson }} = {{ include "kvtier.toml" (get $ $key) }}{{ end -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "kvtier.toml" $item }}{{ end -}} ]
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end }}
