{{- /*
What the generated templates are filled with: what dra_bridge/manifests.py computes from a configuration, under the same
names. tests/test_installers.py compares the objects of both.
*/ -}}

{{- /* The values of the whole release, as JSON; groups: the values of each DaemonSet; classes: of each DeviceClass. */ -}}
{{- define "dra-bridge.values" -}}
{{- $groups := list -}}
{{- range $group, $changes := .Values.groups | default (dict "" dict) -}}
  {{- $values := dict -}}
  {{- range $key, $value := $.Values -}}
    {{- $_ := set $values $key $value -}}
  {{- end -}}
  {{- range $key, $value := $changes -}}
    {{- if eq $key "image" -}}
      {{- $value = merge (dict) $value $.Values.image -}}
    {{- end -}}
    {{- $_ := set $values $key $value -}}
  {{- end -}}
  {{- $groups = append $groups (include "dra-bridge.group" (dict "root" $ "group" $group "values" $values) | fromJson) -}}
{{- end -}}
{{- $drivers := list -}}
{{- $resources := list -}}
{{- $classes := dict -}}
{{- $hard := dict -}}
{{- $quotas := list -}}
{{- $devices := toString .Values.quota.devices -}}
{{- $apart := semverCompare "<1.36-0" .Capabilities.KubeVersion.Version -}}
{{- $port := 0 -}}
{{- range $groups -}}
  {{- $drivers = concat $drivers .drivers -}}
  {{- $resources = concat $resources .resources -}}
  {{- $port = .metrics_port | default $port -}}
  {{- range .served -}}
    {{- $_ := set $hard (printf "requests.%s" .) $devices -}}
  {{- end -}}
  {{- range .classes -}}
    {{- $_ := set $classes .class_name . -}}
    {{- if or $apart (not .extended_resource_name) -}}
      {{- $_ := set $hard (printf "%s.deviceclass.resource.k8s.io/devices" .class_name) $devices -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range .Values.quota.namespaces -}}
  {{- $quotas = append $quotas (dict "tenant" . "hard" $hard) -}}
{{- end -}}
{{- if ne (empty $quotas) (eq (int .Values.quota.devices) 0) -}}
  {{- fail "quota.devices and quota.namespaces belong together" -}}
{{- end -}}
{{- $drivers = $drivers | uniq | sortAlpha -}}
{{- $kueue := "" -}}
{{- if and .Values.kueue $resources -}}
  {{- if gt (len ($resources | uniq)) 16 -}}
    {{- fail "kueue: Kueue takes 16 deviceClassMappings at most, and there are more resources" -}}
  {{- end -}}
  {{- $kueue = "apiVersion: config.kueue.x-k8s.io/v1beta2\nkind: Configuration\nresources:\n  deviceClassMappings:\n" -}}
  {{- $mapped := dict -}}
  {{- range $group := $groups -}}
    {{- range $group.classes -}}
      {{- if not (hasKey $mapped .resource) -}}
        {{- $_ := set $mapped .resource true -}}
        {{- $kueue = printf "%s  - {name: %q, deviceClassNames: [%q]}\n" $kueue .resource .class_name -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $chosen := "" -}}
{{- range $driver := keys .Values.checkParameters | sortAlpha -}}
  {{- if not (has $driver $drivers) -}}
    {{- fail (printf "checkParameters: no resource has the driver %s" $driver) -}}
  {{- end -}}
  {{- $chosen = printf "%sp.driver == %q ? [%s].filter(t, t != \"\").map(t, \"parameters of %s: \" + t) : " $chosen $driver (get $.Values.checkParameters $driver) $driver -}}
{{- end -}}
{{- dict
    "kueue" $kueue
    "parameter_problem" ($chosen | empty | ternary "" (printf "variables.config.filter(c, has(c.opaque)).map(c, c.opaque).map(p, %s[]).filter(t, t.size() > 0).map(t, t[0])[?0].orValue(\"\")" $chosen))
    "quotas" $quotas
    "name" (include "dra-bridge.name" .)
    "namespace" .Release.Namespace
    "more_labels" .Values.commonLabels
    "groups" $groups
    "classes" (values $classes)
    "drivers" $drivers
    "driver_list" (include "dra-bridge.list" $drivers)
    "resource_list" (include "dra-bridge.list" ($resources | uniq | sortAlpha))
    "bridge" (not (empty $drivers))
    "claim_status" (and .Values.claimStatus (not (empty $drivers)))
    "flow_schema" (and .Values.flowSchema (not (empty $drivers)))
    "asks_agents" (and $port (not (empty $drivers)))
    "metrics_port" $port
    "version" (include "dra-bridge.version" .)
  | toJson -}}
{{- end -}}

{{- /* The values of one DaemonSet, as JSON; of root, the group's name and its values. */ -}}
{{- define "dra-bridge.group" -}}
{{- $values := .values -}}
{{- $config := $values.config -}}
{{- $text := printf "%s\n" (toYaml $config) -}}
{{- if kindIs "string" $config -}}
  {{- $text = $config -}}
  {{- $config = fromYaml $config -}}
  {{- with $config.Error -}}
    {{- fail (printf "config is no YAML: %s" .) -}}
  {{- end -}}
{{- end -}}
{{- $where := .group | empty | ternary "config" (printf "groups.%s.config" .group) -}}
{{- if empty $config.resources -}}
  {{- fail (printf "%s.resources is empty: write there what the agent serves, or name a config file by --set-file config=FILE" $where) -}}
{{- end -}}
{{- $served := list -}}
{{- $classes := list -}}
{{- $drivers := list -}}
{{- $resources := list -}}
{{- $globs := list -}}
{{- $made := list -}}
{{- $paths := list -}}
{{- $commands := false -}}
{{- $plugins := false -}}
{{- $nvidia := list -}}
{{- $reasons := list -}}
{{- $extended := and .root.Values.extendedResource (semverCompare ">=1.34-0" .root.Capabilities.KubeVersion.Version) -}}
{{- if kindIs "string" $values.config -}}
  {{- if not (kindIs "slice" $config.resources) -}}
    {{- fail (printf "%s.resources is no list; `deviceplugin validate FILE` says what is wrong" $where) -}}
  {{- end -}}
  {{- range $number, $resource := $config.resources -}}
    {{- if or (not (kindIs "map" $resource)) (not (regexMatch (include "dra-bridge.resource-pattern" $) (toString $resource.name))) -}}
      {{- fail (printf "%s.resources[%d].name is not like example.com/fpga; `deviceplugin validate FILE` says what is wrong" $where $number) -}}
    {{- end -}}
    {{- if and $resource.driver (not (regexMatch (include "dra-bridge.driver-pattern" $) (toString $resource.driver))) -}}
      {{- fail (printf "%s.resources[%d].driver is not like fpga.example.com; `deviceplugin validate FILE` says what is wrong" $where $number) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $resource := $config.resources -}}
  {{- $served = append $served .name -}}
  {{- if and .driver $values.bridge -}}
    {{- $drivers = append $drivers .driver -}}
    {{- $resources = append $resources .name -}}
    {{- $classes = append $classes (dict
        "attribute" "extendedResource"
        "canonical" (include "dra-bridge.canonical" .name)
        "class_name" (include "dra-bridge.class" (list .name .driver))
        "driver" .driver
        "resource" .name
        "extended_resource_name" ($extended | ternary .name "")) -}}
  {{- end -}}
  {{- $globs = concat $globs (.nodes | default list) -}}
  {{- range .mounts -}}
    {{- $paths = append $paths .host -}}
  {{- end -}}
  {{- $real := false -}}
  {{- $partitions := false -}}
  {{- $library := false -}}
  {{- range .devices -}}
    {{- $globs = concat $globs (.path | empty | ternary list (list .path)) (.group | default list) -}}
    {{- if hasKey . "simulated" -}}
      {{- $file := (.simulated | default dict).unhealthy_file -}}
      {{- $made = concat $made ($file | empty | ternary list (list $file)) -}}
    {{- else -}}
      {{- $real = true -}}
    {{- end -}}
    {{- $plugins = or $plugins (hasKey . "plugin") -}}
    {{- if hasKey . "nvidia" -}}
      {{- $gpus := .nvidia | default dict -}}
      {{- $nvidia = append $nvidia $gpus -}}
      {{- $partitions = or $partitions (ne ($gpus.mig | default "none") "none") (not (empty $gpus.profile)) -}}
      {{- $library = or $library (not (empty $gpus.library)) -}}
    {{- end -}}
  {{- end -}}
  {{- $probe := (.health | default dict).probe | default "none" -}}
  {{- $command := not (kindIs "string" $probe) -}}
  {{- if and (not $command) $real (eq (toString $probe) "open") -}}
    {{- $reasons = append $reasons (printf "%s: `health.probe: open` opens device nodes" .name) -}}
  {{- end -}}
  {{- if $command -}}
    {{- $reasons = append $reasons (printf "%s: the command of `health.probe` may open device nodes" .name) -}}
  {{- end -}}
  {{- if $partitions -}}
    {{- $reasons = append $reasons (printf "%s: an unprivileged container may not see partitions that are made later" .name) -}}
  {{- end -}}
  {{- if $library -}}
    {{- $reasons = append $reasons (printf "%s: `library` opens the GPUs' nodes without the NVIDIA runtime" .name) -}}
  {{- end -}}
  {{- $commands = or $commands $command $library -}}
{{- end -}}
{{- $drivers = $drivers | uniq | sortAlpha -}}
{{- $bridge := not (empty $drivers) -}}
{{- if ne $values.privileged "auto" -}}
  {{- $reasons = eq $values.privileged "always" | ternary (list "the deployment asks for it") list -}}
{{- end -}}
{{- $root := $values.kubeletRoot | trimSuffix "/" -}}
{{- $arguments := list -}}
{{- if not $values.command -}}
  {{- $arguments = list "run" "--config=/etc/dra-bridge/config.yaml" -}}
{{- end -}}
{{- $arguments = append $arguments "--cgroup-root=/host/sys/fs/cgroup" -}}
{{- if and $values.claimStatus $bridge -}}
  {{- $arguments = append $arguments "--claim-status" -}}
{{- end -}}
{{- if ne $root "/var/lib/kubelet" -}}
  {{- $arguments = append $arguments (printf "--kubelet-root=%s" $root) -}}
{{- end -}}
{{- if ne $values.devicePluginDir (printf "%s/device-plugins" $root) -}}
  {{- $arguments = append $arguments (printf "--device-plugin-dir=%s" $values.devicePluginDir) -}}
{{- end -}}
{{- with $values.podResourcesSocket -}}
  {{- $arguments = append $arguments (printf "--pod-resources-socket=%s" .) -}}
{{- end -}}
{{- if ne $values.podLogDir "/var/log/pods" -}}
  {{- $arguments = append $arguments (printf "--pod-log-dir=%s" $values.podLogDir) -}}
{{- end -}}
{{- if ne $values.cdiDir "/var/run/cdi" -}}
  {{- $arguments = append $arguments (printf "--cdi-dir=%s" $values.cdiDir) -}}
{{- end -}}
{{- if $values.metricsPort -}}
  {{- $arguments = append $arguments (printf "--metrics-address=:%d" (int $values.metricsPort)) -}}
{{- end -}}
{{- if not $values.command -}}
  {{- if $commands -}}
    {{- $arguments = append $arguments "--allow-commands" -}}
  {{- end -}}
  {{- range concat $globs $made $paths | uniq | sortAlpha -}}
    {{- if not (regexMatch "^/+dev(/|$)" .) -}}
      {{- $arguments = append $arguments (printf "--allow-host-path=%s" .) -}}
    {{- end -}}
  {{- end -}}
  {{- if $plugins -}}
    {{- $arguments = append $arguments "--adopt=/run/deviceplugin/plugins" -}}
  {{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- $mounts := list -}}
{{- $directories := include "dra-bridge.directories" (dict "globs" $globs "made" $made) | fromJson -}}
{{- range $number, $directory := keys $directories | sortAlpha -}}
  {{- $name := printf "devices-%d" $number -}}
  {{- $volumes = append $volumes (dict "name" $name "hostPath" (dict "path" $directory "type" (get $directories $directory))) -}}
  {{- $mounts = append $mounts (dict "name" $name "mountPath" $directory "readOnly" true "mountPropagation" "HostToContainer") -}}
{{- end -}}
{{- if $plugins -}}
  {{- $volumes = append $volumes (dict "name" "adopted" "hostPath" (dict "path" "/run/deviceplugin/plugins" "type" "DirectoryOrCreate")) -}}
  {{- $mounts = append $mounts (dict "name" "adopted" "mountPath" "/run/deviceplugin/plugins") -}}
{{- end -}}
{{- range $directory := list "/etc/cdi" "/var/run/cdi" -}}
  {{- if ne $values.cdiDir $directory -}}
    {{- $name := trimPrefix "/" $directory | replace "/" "-" -}}
    {{- $volumes = append $volumes (dict "name" $name "hostPath" (dict "path" $directory "type" "DirectoryOrCreate")) -}}
    {{- $mounts = append $mounts (dict "name" $name "mountPath" $directory "readOnly" true) -}}
  {{- end -}}
{{- end -}}
{{- $image := $values.image -}}
{{- $release := include "dra-bridge.name" .root -}}
{{- $name := .group | empty | ternary $release (printf "%s-%s" $release .group) -}}
{{- if gt (len $name) 63 -}}
  {{- fail (printf "the name %s is longer than 63 characters: use a shorter release name, fullnameOverride or group" $name) -}}
{{- end -}}
{{- $because := $reasons | empty | ternary dict (dict "dra-bridge/privileged-because" (join "; " $reasons)) -}}
{{- dict
    "name" $name
    "more_labels" .root.Values.commonLabels
    "pod_labels" (include "dra-bridge.labels" (list .root $name $values.podLabels) | fromYaml)
    "pod_annotations" (merge $because ($values.podAnnotations | default dict))
    "bridge" $bridge
    "not_bridge" (not $bridge)
    "token" false
    "service_account" ($bridge | ternary $release "default")
    "privileged" (not (empty $reasons))
    "unprivileged" (empty $reasons)
    "escalation" false
    "reasons" (join "; " $reasons)
    "runs_programs" (or $commands (not (empty $values.command)))
    "port_capabilities" (and (gt (int $values.metricsPort) 0) (lt (int $values.metricsPort) 1024) | ternary (list "NET_BIND_SERVICE") list)
    "namespace" .root.Release.Namespace
    "drivers" $drivers
    "resources" $resources
    "served" $served
    "classes" $classes
    "config" ($values.command | empty | ternary $text "")
    "command" ($values.command | default (list ($bridge | ternary "dra-bridge" "deviceplugin")))
    "arguments" (concat $arguments ($values.extraArgs | default list))
    "more_env" $values.env
    "image" (printf "%s:%s%s" $image.repository ($image.tag | default .root.Chart.AppVersion) ($image.digest | empty | ternary "" (printf "@%s" $image.digest)))
    "pull_policy" $image.pullPolicy
    "image_pull_secrets" $values.imagePullSecrets
    "priority_class" $values.priorityClass
    "tolerations" $values.tolerations
    "node_selector" (merge (dict) ($values.nodeSelector | default dict) (dict "kubernetes.io/os" "linux"))
    "affinity" $values.affinity
    "runtime_class" $values.runtimeClass
    "update_strategy" (eq ($values.updateStrategy.type | default "") "OnDelete" | ternary
      $values.updateStrategy
      (mergeOverwrite (deepCopy $values.updateStrategy) (dict "rollingUpdate" (dict "maxSurge" 0))))
    "container_resources" (mergeOverwrite
      (dict "requests" (dict "cpu" "10m" "memory" "72Mi") "limits" (dict "memory" $values.memory))
      ($values.resources | default dict))
    "nvidia" $nvidia
    "root" $root
    "device_plugin_directory" $values.devicePluginDir
    "pod_resources_directory" (dir ($values.podResourcesSocket | default (printf "%s/pod-resources/x" $root)))
    "cgroup_root" $values.cgroupRoot
    "pod_log_directory" $values.podLogDir
    "cdi_directory" $values.cdiDir
    "metrics_port" $values.metricsPort
    "scheme" (($config.metrics | default dict).certificate | empty | ternary "" "HTTPS")
    "more_volumes" (concat $volumes ($values.volumes | default list))
    "more_volume_mounts" (concat $mounts ($values.volumeMounts | default list))
  | toJson -}}
{{- end -}}

{{- /* What all objects are called after. */ -}}
{{- define "dra-bridge.name" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end -}}

{{- /* The labels of an object: of root, the object's name and more labels. */ -}}
{{- define "dra-bridge.labels" -}}
{{- merge
    (dict "app.kubernetes.io/name" (index . 1) "app.kubernetes.io/managed-by" "dra-bridge")
    (index . 2 | default dict)
    ((index . 0).Values.commonLabels | default dict)
  | toYaml -}}
{{- end -}}

{{- /* The version of resource.k8s.io that DeviceClasses are written in. */ -}}
{{- define "dra-bridge.version" -}}
{{- $found := .Values.resourceApi -}}
{{- range tuple "v1" "v1beta2" "v1beta1" -}}
  {{- if and (not $found) ($.Capabilities.APIVersions.Has (printf "resource.k8s.io/%s" .)) -}}
    {{- $found = . -}}
  {{- end -}}
{{- end -}}
{{- $found | default "v1" -}}
{{- end -}}

{{- /* A list as a policy's expression has it. */ -}}
{{- define "dra-bridge.list" -}}
{{- . | default list | toJson | replace "\",\"" "\", \"" -}}
{{- end -}}

{{- /* deviceplugin.naming.canonical_resource */ -}}
{{- define "dra-bridge.canonical" -}}
{{- if le (len .) 64 }}{{ . }}{{ else }}{{ substr (int (sub (len .) 53)) (len .) . }}-{{ sha256sum . | trunc 10 }}{{ end -}}
{{- end -}}

{{- /* deviceplugin.naming.class_name, of a resource and its driver */ -}}
{{- define "dra-bridge.class" -}}
{{- $resource := index . 0 -}}
{{- $driver := index . 1 -}}
{{- $parts := splitList "/" $resource -}}
{{- $domain := first $parts -}}
{{- $word := last $parts -}}
{{- if eq (printf "%s.%s" $word $domain) $driver -}}
  {{- $driver -}}
{{- else if and (eq $domain (splitList "." $driver | rest | join ".")) (le (len $word) 20) (not (contains "--" $word)) (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$" $word) -}}
  {{- printf "%s.%s" $word $driver -}}
{{- else -}}
  {{- $slug := regexReplaceAll "[^a-z0-9]+" (lower $word) "-" | trimAll "-" | default "x" -}}
  {{- printf "%s-%s.%s" ($slug | trunc 9 | trimSuffix "-") (sha256sum $resource | trunc 10) $driver -}}
{{- end -}}
{{- end -}}

{{- /*
The host's directories, other than /dev, in which these paths and globs lie, as JSON: the type of each by its path
(manifests._directories). globs: of devices; made: paths whose directories are made.
*/ -}}
{{- define "dra-bridge.directories" -}}
{{- $found := dict -}}
{{- range $key := list "made" "globs" -}}
  {{- range get $ $key -}}
    {{- $fixed := "" -}}
    {{- $ends := false -}}
    {{- range dir . | splitList "/" | rest -}}
      {{- $ends = or $ends (regexMatch "[*?\\[]" .) -}}
      {{- if and . (not $ends) -}}
        {{- $fixed = printf "%s/%s" $fixed . -}}
      {{- end -}}
    {{- end -}}
    {{- if and $fixed (ne $fixed "/dev") (not (hasPrefix "/dev/" $fixed)) -}}
      {{- $_ := set $found $fixed (eq $key "made" | ternary "DirectoryOrCreate" "Directory") -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $outer := dict -}}
{{- range $one, $type := $found -}}
  {{- $inside := false -}}
  {{- range $other, $_ := $found -}}
    {{- $inside = or $inside (hasPrefix (printf "%s/" $other) $one) -}}
  {{- end -}}
  {{- if not $inside -}}
    {{- $_ := set $outer $one $type -}}
  {{- end -}}
{{- end -}}
{{- $outer | toJson -}}
{{- end -}}
