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
}

#[test]
fn devices_are_tested() {
    let text = run(&["devices", "--check"]);
    assert!(text.status.success());
    let json: Value = serde_json::from_slice(&run(&["devices", "--check", "--json"]).stdout).unwrap();
    let tests = json["devices"][0]["tests"].as_array().unwrap();
    let operations: Vec<_> = tests.iter().map(|test| test["operation"].as_str().unwrap()).collect();
    assert_eq!(operations, ["connect", "SEND", "WRITE", "READ"]);
    assert!(tests.iter().all(|test| test["micros"].is_u64()), "{tests:?}");
    let printed = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        operations.iter().all(|operation| printed.contains(&format!("self-test, {operation}"))),
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
