{{- /* Generated from deviceplugin/naming.py by `python -m tests.chart --write`. */ -}}
{{- define "dra-bridge.resource-pattern" -}}^[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?${{- end -}}
{{- define "dra-bridge.driver-pattern" -}}^[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*${{- end -}}
