//! The results of a run: JSON, table and plot.

use serde_json::Value;

use crate::{file, onnx, run, stderr, stdout};

const MODES: [&str; 6] = ["grpc-tcp", "grpc-rdma", "grpc-native", "rdma-cp", "rdma-zerocp", "rdma-in-place"];

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
        let (before, after) = match row["mode"].as_str().unwrap() {
            "rdma-zerocp" => (0, sent),
            "rdma-in-place" => (0, 0),
            _ => (sent, sent),
        };
        let counts = ["sent", "sender_copies", "received", "receiver_copies"];
        assert_eq!(counts.map(|field| row[field].as_u64().unwrap()), [sent, before, sent, after], "{row}");
        assert!(text.contains(&format!("{before} / {sent}")), "{text}");
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
        // What is read goes to where the engine computes.
        let zerocp = json["modes"].as_array().unwrap().iter().find(|row| row["mode"] == "rdma-zerocp");
        assert_eq!(zerocp.unwrap()["receiver_copies"], 0, "{zerocp:?}");
        let why = tensor["why"].as_str().unwrap();
        assert!(why.contains('N') && why.contains("image"), "{why}");
    }
    assert_eq!(json["nodes"].as_array().unwrap().len(), 4);
}

/// Returns the numbers of the memory of each part: slots and sends, each with preallocated, used, beyond and
/// refused.
fn memory(json: &Value) -> Vec<[[u64; 4]; 2]> {
    let numbers = |part: &Value, of: &str| {
        ["preallocated", "used", "beyond", "refused"].map(|field| part[of][field].as_u64().unwrap())
    };
    let parts = json["memory"].as_array().unwrap().iter();
    parts.map(|part| ["slots", "sends"].map(|of| numbers(part, of))).collect()
}

#[test]
fn what_the_analysis_preallocates_is_what_is_used() {
    for parts in ["2", "4"] {
        let (json, text, _) = measure(&["--parts", parts, "--micro-batches", "3"]);
        check_modes(&json, &MODES);
        let bytes = |tensor: &Value| tensor["bytes"].as_u64().unwrap();
        let tensors = json["tensors"].as_array().unwrap();
        for (part, [slots, sends]) in memory(&json).into_iter().enumerate() {
            let crossing =
                |side: &str| -> u64 { tensors.iter().filter(|tensor| tensor[side] == part).map(bytes).sum() };
            for ([preallocated, used, beyond, refused], content) in
                // Two modes have static slots. Each tensor has a buffer for each micro-batch under way.
                [(slots, 2 * 3 * crossing("to")), (sends, 3 * crossing("from"))]
            {
                assert!(used >= preallocated - preallocated / 20, "part {part}: {used} of {preallocated}");
                assert_eq!((beyond, refused), (0, 0), "part {part}");
                let overhead = preallocated - content;
                assert!(overhead <= content / 20 + 2048, "part {part}: {preallocated} for {content}");
            }
            assert!(text.contains(&format!("registered memory of part {part}: ")), "{text}");
        }
    }
}

#[test]
fn less_memory_makes_the_largest_tensors_dynamic_and_too_little_is_an_error() {
    let (_folder, model) = file(&onnx::convolutions());
    let arguments = [model.to_str().unwrap(), "--mode", "rdma-zerocp", "--parts", "3", "--memory", "100"];
    let output = run(&arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let least =
        text.split_once("too little, ").and_then(|(_, rest)| rest.split_once(" are the least")).unwrap();

    let arguments = ["--mode", "rdma-zerocp", "--parts", "3", "--memory", least.0, "--explain"];
    let (json, text, _) = measure(&arguments);
    check_modes(&json, &["rdma-zerocp"]);
    let dynamic = |tensor: &&Value| tensor["placement"] == "dynamic";
    let tensors = json["tensors"].as_array().unwrap();
    assert!(tensors.iter().any(|tensor| dynamic(&tensor)), "{tensors:?}");
    for tensor in tensors.iter().filter(dynamic) {
        let why = tensor["why"].as_str().unwrap();
        assert!(why.contains("all dimensions are known, but") && text.contains(why), "{why}");
        assert_eq!(tensor["sender_copies"], 0, "{tensor}");
    }
    let reserved = memory(&json).into_iter().map(|[slots, sends]| slots[0] + sends[0]).max().unwrap();
    assert!(reserved <= least.0.parse().unwrap(), "{reserved} of {}", least.0);
}

#[test]
fn several_threads_give_what_the_unsplit_model_gives() {
    let (json, ..) = measure(&["--threads", "3", "--mode", "grpc-tcp,rdma-zerocp", "--micro-batches", "3"]);
    check_modes(&json, &["grpc-tcp", "rdma-zerocp"]);
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
