{{- define "stele.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "stele.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "stele.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* A Service's name has 63 characters at most. */ -}}
{{- define "stele.metricsService" -}}
{{- printf "%s-metrics" (include "stele.fullname" . | trunc 55 | trimSuffix "-") -}}
{{- end -}}

{{- define "stele.selector" -}}
app.kubernetes.io/name: {{ include "stele.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stele.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "stele.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "stele.serviceAccount" -}}
{{- default (ternary (include "stele.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "stele.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "stele.nodeImage" -}}
{{- printf "%s:%s" .Values.nodeImage.repository (default .Chart.AppVersion .Values.nodeImage.tag) -}}
{{- end -}}

{{- /* What a pod of ours may do: nothing but its work. */ -}}
{{- define "stele.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "stele.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* What the operator does in a namespace that it looks after; each verb is one that it sends. */ -}}
{{- define "stele.rules" -}}
- apiGroups: [stele.dev]
  resources: [tabletclusters]
  verbs: [get, list, watch]
- apiGroups: [stele.dev]
  resources: [tabletgroups]         # patch: its one finalizer, put on and taken off
  verbs: [list, watch, patch]
- apiGroups: [stele.dev]
  resources: [tabletclusters/status, tabletgroups/status]
  verbs: [patch]
- apiGroups: [stele.dev]
  resources: [tabletbackups]        # create, delete: those of a schedule; patch: the one finalizer
  verbs: [list, watch, create, patch, delete]
- apiGroups: [stele.dev]
  resources: [tabletbackupschedules, tabletrestores]
  verbs: [list, watch]
- apiGroups: [stele.dev]
  resources: [tabletbackups/status, tabletbackupschedules/status, tabletrestores/status]
  verbs: [patch]
- apiGroups: [batch]
  resources: [jobs]                 # of backups, restores and drills
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [pods/log]             # the progress of these
  verbs: [get]
- apiGroups: [""]
  resources: [pods]                 # patch: labels that were lost, a finalizer of a Job's pod on a machine that is gone
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [list, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, create, patch]
- apiGroups: [""]
  resources: [configmaps]           # the identity of each cluster
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- end -}}
