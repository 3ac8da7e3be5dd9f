{{/* Names: RELEASE-COMPONENT, or RELEASE-fulcrum-COMPONENT where the release is not named after the chart. */}}
{{- define "fulcrum.name" -}}
{{- ternary .Release.Name (printf "%s-fulcrum" .Release.Name) (contains "fulcrum" .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "fulcrum.cluster" -}}
{{- .Values.cluster | default (printf "%s-%s" .Release.Namespace .Release.Name | trunc 32 | trimSuffix "-") -}}
{{- end }}

{{/* Labels that select: (list root component). */}}
{{- define "fulcrum.selector" -}}
app.kubernetes.io/name: fulcrum
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "fulcrum.labels" -}}
{{ include "fulcrum.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{- define "fulcrum.image" -}}
{{- $root := index . 0 -}}
{{ $root.Values.image.repository }}/{{ index . 1 }}:{{ $root.Values.image.tag }}
{{- end }}

{{- define "fulcrum.workerImage" -}}
{{ include "fulcrum.image" (list . (ternary "control" .Values.engine (eq .Values.engine "sim"))) }}
{{- end }}

{{/* Folder of a model in every pod, or what stands for it with simulated GPUs: (list root model). */}}
{{- define "fulcrum.modelPath" -}}
{{ ternary "builtin:sim" (printf "/models/%s" (index . 1)) (eq (index . 0).Values.engine "sim") }}
{{- end }}

{{/* All models and their folders as JSON: that of all pools, and pools' own. */}}
{{- define "fulcrum.models" -}}
{{- $root := . -}}
{{- $found := dict .Values.model.name (include "fulcrum.modelPath" (list . .Values.model.name)) -}}
{{- range .Values.pools }}
{{- with .model }}{{- $_ := set $found . (include "fulcrum.modelPath" (list $root .)) }}{{- end }}
{{- end }}
{{- toJson $found -}}
{{- end }}

{{/* Pools that the planner scales, as a JSON list. */}}
{{- define "fulcrum.scales" -}}
{{- $scales := .Values.planner.scales -}}
{{- if kindIs "string" $scales }}{{- $scales = ternary (list) (list $scales) (eq $scales "") }}{{- end }}
{{- $models := dict -}}
{{- range $scales }}
{{- if not (hasKey $.Values.pools .) }}
{{- fail (printf "planner.scales names the pool %q, and pools has no such one: name one of %s, or \"\"" . (keys $.Values.pools | sortAlpha | join ", ")) }}
{{- end }}
{{- $model := (index $.Values.pools .).model | default $.Values.model.name -}}
{{- if hasKey $models $model }}
{{- fail (printf "planner.scales names the pools %q and %q of the model %s: the planner scales one of each model" (get $models $model) . $model) }}
{{- end }}
{{- $_ := set $models $model . }}
{{- end }}
{{- toJson $scales -}}
{{- end }}

{{- define "fulcrum.kafka" -}}
{{ .Values.kafka.address | default (printf "%s-kafka:9092" (include "fulcrum.name" .)) }}
{{- end }}

{{/* Environment: (list root variables). Later dicts of `variables` win; Kubernetes would take one of two at will. */}}
{{- define "fulcrum.env" -}}
{{- $root := index . 0 -}}
{{- $set := dict "FULCRUM_HOST" "0.0.0.0" "FULCRUM_KEYS" "redis" "FULCRUM_CLUSTER" (include "fulcrum.cluster" $root) "FULCRUM_KAFKA" (include "fulcrum.kafka" $root) -}}
{{- if not $root.Values.redis.existingSecret -}}
{{- $_ := set $set "FULCRUM_REDIS" ($root.Values.redis.address | default (printf "redis://%s-redis:6379/0" (include "fulcrum.name" $root))) -}}
{{- end -}}
{{- if $root.Values.tls.existingSecret -}}
{{- $_ := merge $set (dict "FULCRUM_TLS_CERT" "/tls/tls.crt" "FULCRUM_TLS_KEY" "/tls/tls.key" "FULCRUM_TLS_CA" "/tls/ca.crt") -}}
{{- else -}}
{{- $_ := set $set "FULCRUM_ALLOW_PLAINTEXT_TOKEN" "1" -}}
{{- end -}}
{{- range prepend (index . 1) $root.Values.env -}}
{{- $set = mergeOverwrite $set . -}}
{{- end -}}
{{- range $name, $value := $set }}
- name: {{ $name }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ $value | toJson | quote }}{{ end }}
{{- end }}
- name: FULCRUM_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $root.Values.token.existingSecret | default (printf "%s-token" (include "fulcrum.name" $root)) }}, key: token}}
- name: FULCRUM_NODE
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- with $root.Values.redis.existingSecret }}
- name: FULCRUM_REDIS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: url}}
{{- end }}
{{- end }}

{{/* What every pod of ours has: (list root component values). */}}
{{- define "fulcrum.pod" -}}
{{- $root := index . 0 -}}
{{- $values := index . 2 -}}
enableServiceLinks: false # a Service's own FULCRUM_GATEWAY_PORT would stand in for the setting
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with $root.Values.topologySpread }}
topologySpreadConstraints:
{{- range . }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "fulcrum.selector" (list $root (index $ 1)) | nindent 8 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "fulcrum.container" -}}
{{- $root := index . 0 -}}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Volumes of every pod of ours: (list root). */}}
{{- define "fulcrum.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "fulcrum.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{/* Puts models where gateways and workers read them; nothing with simulated GPUs: (list root models). */}}
{{- define "fulcrum.fetch" -}}
{{- $root := index . 0 -}}
{{- if ne $root.Values.engine "sim" }}
initContainers:
{{- range $number, $model := index . 1 }}
  - name: model{{ if $number }}-{{ $number }}{{ end }}
    image: {{ include "fulcrum.workerImage" $root }}
    command: [python, -m, libs.model.prepare, {{ $model | quote }}, /models]
    {{- include "fulcrum.container" (list $root) | nindent 4 }}
    {{- with $root.Values.model.hubTokenSecret }}
    env:
      - name: HF_TOKEN
        valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
    {{- end }}
    resources:
      requests: {cpu: 250m, memory: 512Mi}
      limits: {memory: 4Gi}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end }}

{{/* A pool's values over those of all: (list root pool). */}}
{{- define "fulcrum.poolValues" -}}
{{- $root := index . 0 -}}
{{- mergeOverwrite (deepCopy $root.Values.worker) (deepCopy (index . 1)) | toJson -}}
{{- end }}

{{/* A PodDisruptionBudget: (list root component). */}}
{{- define "fulcrum.disruption" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "fulcrum.name" $root }}-{{ index . 1 }}
  labels: {{- include "fulcrum.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "fulcrum.selector" . | nindent 6 }}
{{- end }}
{{- end }}
