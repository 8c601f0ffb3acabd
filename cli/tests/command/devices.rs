//! `devices` and `tune`.

use serde_json::Value;

use super::process::run;

#[test]
fn devices_are_listed() {
    let text = run(&["devices"]);
    assert!(text.status.success());
    let printed = String::from_utf8_lossy(&text.stdout);
    assert!(printed.contains("soft0 (soft): usable") && printed.contains("\nprocessors: "), "{printed}");
    let json: Value = serde_json::from_slice(&run(&["devices", "--json"]).stdout).unwrap();
    assert_eq!(json["devices"][0]["name"], "soft0");
    assert_eq!(json["devices"][0]["usable"], true);
    assert!(json["devices"][0].get("tests").is_none());
    // Numbers are numbers, and names are in snake_case.
    let limits = json["devices"][0]["limits"].as_object().unwrap();
    let is_typed = |(name, value): (&String, &Value)| match name.starts_with("max_") {
        true => value.is_u64(),
        false => value.is_boolean(),
    };
    assert!(limits.len() == 11 && limits.iter().all(is_typed), "{limits:?}");
    assert_eq!(limits["max_message_bytes"], 2_u64 << 30);
    let findings = &json["findings"];
    let uid = rustix::process::geteuid().as_raw();
    assert_eq!(findings["process"]["uid"], uid, "{findings}");
    assert!(
        findings["processors"]["cpus"].is_u64() && findings["open_files"]["limit"].is_u64(),
        "{findings}"
    );
    assert!(
        findings["process"]["net_namespace"].is_u64() && findings["boot"]["id"].is_string(),
        "{findings}"
    );
}

#[test]
fn json_goes_to_stdout_or_to_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("devices.json");
    let output = run(&["devices", "--json", file.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("soft0 (soft): usable"), "{output:?}");
    let written: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["devices"][0]["name"], "soft0");
    for arguments in [&["devices", "-J"][..], &["devices", "--json", "-"], &["devices", "--json=-"]] {
        let output = run(arguments);
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(printed["devices"] == written["devices"] && output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn devices_are_tested() {
    let text = run(&["devices", "--check"]);
    assert!(text.status.success());
    let json: Value = serde_json::from_slice(&run(&["devices", "--check", "--json"]).stdout).unwrap();
    let tests = json["devices"][0]["tests"].as_array().unwrap();
    let operations: Vec<_> = tests.iter().map(|test| test["operation"].as_str().unwrap()).collect();
    assert_eq!(operations, ["connect", "SEND", "WRITE", "READ"]);
    assert!(tests.iter().all(|test| test["passed"] == true), "{tests:?}");
    assert!(
        tests[1..].iter().all(|test| test["shortest_us"].is_f64() && test["bytes"] == 65_536),
        "{tests:?}"
    );
    let printed = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        operations.iter().all(|operation| printed.contains(&format!("self-test, {operation}")))
            && printed.contains("one thread polls both ends"),
        "{printed}"
    );
}

#[test]
fn a_device_is_tuned() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("tune.json");
    let output = run(&["tune", "--device", "soft0", "--json", json.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("soft0 (soft)") && printed.contains("choice: rendezvous never"), "{printed}");

    let written: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((&written["device"], &written["provider"]), (&"soft0".into(), &"soft".into()));
    let sizes = written["sizes"].as_array().unwrap();
    assert!(sizes.len() > 5, "{written}");
    for size in sizes {
        for figure in ["eager_us", "rendezvous_us", "registered_eager_us", "registered_rendezvous_us"] {
            assert!(size[figure].as_f64().unwrap() > 0.0, "{figure} in {size}");
        }
    }
    assert!(written["chunk_bytes"].as_u64().unwrap() >= 65_536);
    assert!(written["threshold_bytes"].is_null(), "no write of the software device goes by rendezvous");
}
