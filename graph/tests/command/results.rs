//! The results of a run: JSON, table and plot.

use serde_json::Value;

use crate::{file, onnx, run, stderr, stdout};

const MODES: [&str; 5] = ["grpc-tcp", "grpc-rdma", "grpc-native", "rdma-cp", "rdma-zerocp"];

/// Runs the model of convolutions, and returns the JSON, what the terminal shows, and the plot.
fn measure(arguments: &[&str]) -> (Value, String, String) {
    let (folder, model) = file(&onnx::convolutions());
    let (json, plot) = (folder.path().join("rows.json"), folder.path().join("plot.svg"));
    let mut all = vec![model.to_str().unwrap(), "--steps", "2"];
    all.extend(["--json", json.to_str().unwrap(), "--plot", plot.to_str().unwrap()]);
    all.extend(arguments);
    let output = run(&all);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = std::fs::read_to_string(&json).unwrap();
    (serde_json::from_str(&text).unwrap(), stdout(&output), std::fs::read_to_string(&plot).unwrap())
}

fn check_modes(json: &Value, modes: &[&str]) {
    let rows = json["modes"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["mode"].as_str().unwrap()).collect::<Vec<_>>(), modes);
    for row in rows {
        assert_eq!(row["errors"], 0, "{row}");
        assert!(row["checked"].as_u64().unwrap() > 0, "{row}");
        assert!(
            row["step_us"].as_f64().unwrap() > 0.0 && row["transfer_us"].as_f64().unwrap() > 0.0,
            "{row}"
        );
    }
}

#[test]
fn a_model_in_two_parts_gives_what_the_unsplit_model_gives_in_all_modes() {
    let (json, text, plot) = measure(&["--explain"]);
    check_modes(&json, &MODES);
    let tensors = json["tensors"].as_array().unwrap();
    assert!(!tensors.is_empty());
    for tensor in tensors {
        assert_eq!(tensor["placement"], "static", "{tensor}");
        assert_eq!(tensor["sender_copies"], 0, "{tensor}");
        assert!(tensor["later_steps"]["tensors"].as_u64().unwrap() > 0, "{tensor}");
        assert!(tensor["bytes"].as_u64().unwrap() >= 4, "{tensor}");
        let name = tensor["name"].as_str().unwrap();
        assert!(text.contains(name), "{name} is not explained: {text}");
    }
    // A step has two micro-batches. After the first micro-batch come a step, and two rounds with three
    // micro-batches that are checked (one for each set of inputs) and a step that is measured. Replays do not
    // count.
    let (crossing, later) = (tensors.len() as u64, 2 + 2 * (3 + 2));
    for tensor in tensors {
        assert_eq!(tensor["first_step"]["tensors"], 1, "{tensor}");
        assert_eq!(tensor["later_steps"]["tensors"], later, "{tensor}");
    }
    for row in json["modes"].as_array().unwrap() {
        let sent = crossing * later;
        let copies = if row["mode"] == "rdma-zerocp" { 0 } else { sent };
        assert_eq!(
            (row["sent"].as_u64(), row["sender_copies"].as_u64()),
            (Some(sent), Some(copies)),
            "{row}"
        );
        assert!(text.contains(&format!("{copies} / {sent}")), "{text}");
        // The model has one result.
        assert_eq!(row["checked"], (crossing + 1) * (1 + 2 + 2 * 3), "{row}");
    }
    assert_eq!(json["static_addresses"].as_u64().unwrap() as usize % tensors.len(), 0);
    assert!(json["static_addresses"].as_u64().unwrap() > 0);
    for part in ["transfer", "rdma-zerocp", "2 parts"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(plot.contains("<svg") && plot.contains("rdma-zerocp"));
}

#[test]
fn a_model_in_four_parts_with_a_symbolic_batch_crosses_through_dynamic_slots() {
    let (json, _, _) = measure(&["--parts", "4", "--symbol", "image:0=N", "--lengths", "3,1,2,1"]);
    check_modes(&json, &MODES);
    let tensors = json["tensors"].as_array().unwrap();
    assert!(tensors.len() >= 3, "{tensors:?}");
    for tensor in tensors {
        assert_eq!(tensor["placement"], "dynamic", "{tensor}");
        assert_eq!(tensor["sender_copies"], 0, "{tensor}");
        let why = tensor["why"].as_str().unwrap();
        assert!(why.contains('N') && why.contains("image"), "{why}");
    }
    assert_eq!(json["nodes"].as_array().unwrap().len(), 4);
}

#[test]
fn rounds_can_be_chosen_and_each_has_its_transfer_time() {
    let (json, text, _) = measure(&["--mode", "rdma-cp,rdma-zerocp", "--rounds", "5"]);
    check_modes(&json, &["rdma-cp", "rdma-zerocp"]);
    for row in json["modes"].as_array().unwrap() {
        let of = |field: &str| -> Vec<f64> {
            row[field].as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect()
        };
        let mut transfers = of("transfer_us_of_rounds");
        assert_eq!((transfers.len(), of("step_us_of_rounds").len()), (5, 2), "{row}");
        transfers.sort_by(f64::total_cmp);
        assert_eq!(row["transfer_us"], transfers[2], "{row}");
    }
    assert!(text.contains('[') && text.contains("] "), "{text}");
}

#[test]
fn all_ways_to_receive_give_the_same() {
    for receive in ["polling-async", "blocking", "callback"] {
        let arguments = ["--receive", receive, "--mode", "grpc-tcp,rdma-zerocp", "--micro-batches", "3"];
        let (json, text, _) = measure(&arguments);
        check_modes(&json, &["grpc-tcp", "rdma-zerocp"]);
        assert!(text.contains(receive), "{text}");
    }
}

#[test]
fn one_part_is_the_unsplit_model() {
    let (json, _, _) = measure(&["--parts", "1", "--mode", "rdma-cp"]);
    assert!(json["tensors"].as_array().unwrap().is_empty());
    assert_eq!(json["modes"][0]["errors"], 0);
    // The same, to stdout.
    let (_folder, model) = file(&onnx::convolutions());
    let output =
        run(&[model.to_str().unwrap(), "--parts", "1", "--mode", "rdma-cp", "--steps", "2", "--json", "-"]);
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap()["modes"][0]["errors"], 0);
    assert!(stderr(&output).contains("rdma-cp"), "{output:?}");
}
