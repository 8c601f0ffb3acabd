//! `devices` and `tune`.

use serde_json::Value;

use super::process::{run, tonic_rdma};

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
    let (json, cache) = (folder.path().join("tune.json"), folder.path().join("cache"));
    let tune = |arguments: &[&str]| {
        let output = tonic_rdma(arguments).env("RDMA_TUNE_CACHE", &cache).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let printed = tune(&["tune", "--device", "soft0", "--json", json.to_str().unwrap()]);
    assert!(printed.contains("soft0 (soft)") && printed.contains("choice: rendezvous "), "{printed}");

    let written: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((&written["device"], &written["origin"]), (&"soft0".into(), &"measured".into()));
    let sizes = written["sizes"].as_array().unwrap();
    assert!(sizes.len() > 5, "{written}");
    for size in sizes {
        for figure in ["eager_us", "rendezvous_us", "registered_eager_us", "registered_rendezvous_us"] {
            assert!(size[figure].as_f64().unwrap() > 0.0, "{figure} in {size}");
        }
        assert!(["eager", "rendezvous", "equal"].contains(&size["better"].as_str().unwrap()));
    }
    assert!(written["chunk_bytes"].as_u64().unwrap() >= 65_536);
    assert!(written["threshold_bytes"].is_null(), "no write of the software device goes by rendezvous");

    // A kept calibration is shown again. On a busy machine a calibration is not kept, and the next call
    // measures again.
    if written["kept"].is_string() {
        assert!(tune(&["tune"]).contains("measured before"));
    }
    assert!(!tune(&["tune", "--fresh"]).contains("measured before"));
    let off = tonic_rdma(&["tune"]).output().unwrap();
    assert!(String::from_utf8_lossy(&off.stdout).contains("not kept: "));
}
