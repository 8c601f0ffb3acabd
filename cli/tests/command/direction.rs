//! `compare --direction`: payloads in requests, and payloads in replies.

use super::process::{compare, refused, run, tonic_rdma};

#[test]
fn modes_without_a_direction_down_are_refused() {
    for (arguments, named) in [
        (&["--direction", "sideways"][..], &["sideways", "up", "down"][..]),
        (
            &["--direction", "down", "--modes", "grpc-tcp,grpc-reference,rdma-cp,rdma-zerocp-await"],
            &["--direction down", "grpc-reference, rdma-cp, rdma-zerocp-await", "grpc-native-gather, memcpy"],
        ),
        (&["--direction", "down", "--workload", "skew"], &["--direction down", "--workload"]),
    ] {
        refused(&run(&[&["compare"], arguments].concat()), 2, named);
    }
}

/// Native calls have a budget for messages that land. One payload of this run is longer than the default. The
/// other is longer than half of it, and the receiver keeps one for a check while the next lands. The modes that
/// gather have the same receiver.
#[test]
fn native_calls_carry_payloads_beyond_the_landing_budget_in_both_directions() {
    for (direction, modes) in [("up", "grpc-native,grpc-reference"), ("down", "grpc-native-gather")] {
        let modes = ["--modes", modes, "--direction", direction];
        let (written, _) = compare(
            &[&modes[..], &["--sizes", "140MiB,257MiB", "--inflight", "1", "--duration", "0.01"]].concat(),
        );
        let rows = written["rows"].as_array().unwrap();
        assert_eq!(rows.len(), if direction == "up" { 4 } else { 2 });
        for row in rows {
            assert!(row["errors"] == 0 && row["ops"].as_u64() > Some(0), "{row}");
        }
    }
}

#[test]
fn grpc_modes_carry_payloads_in_both_directions() {
    let usual = [
        "grpc-tcp",
        "grpc-tcp-busy",
        "grpc-tcp-tuned",
        "grpc-uds",
        "grpc-rdma",
        "grpc-rdma-gather",
        "grpc-native",
        "grpc-native-gather",
    ];
    for direction in ["up", "down"] {
        for more in
            [&["--encode", "gather", "--consume", "reduce-max"][..], &["--defaults"], &["--rate", "200"]]
        {
            // `--defaults` has neither a runtime that never sleeps nor tuned windows.
            let is_in = |mode: &&str| more[0] != "--defaults" || !mode.starts_with("grpc-tcp-");
            let modes: Vec<&str> = usual.into_iter().filter(is_in).collect();
            let arguments = ["--direction", direction, "--sizes", "1,100KiB,3MiB", "--duration", "0.02"];
            let list = modes.join(",");
            let listed = ["--modes", &list];
            // These are all modes of the direction down.
            let listed = if direction == "down" { &listed[..0] } else { &listed[..] };
            let (written, printed) = compare(&[&arguments[..], listed, more].concat());
            assert_eq!(
                (&written["direction"], &written["checks"]["mismatches"]),
                (&direction.into(), &0.into())
            );
            let rows = written["rows"].as_array().unwrap();
            assert_eq!(rows.len(), 3 * modes.len());
            for row in rows {
                assert!(row["errors"] == 0 && row["ops"].as_u64() > Some(0), "{row}");
                assert!(
                    row["direction"] == direction && modes.contains(&row["mode"].as_str().unwrap()),
                    "{row}"
                );
            }
            assert!(printed.contains(&format!("direction: {direction}")), "{printed}");
        }
    }
}

#[test]
fn memcpy_runs_with_direction_down() {
    let arguments =
        ["--direction", "down", "--modes", "grpc-tcp,memcpy", "--sizes", "64KiB", "--duration", "0.05"];
    let (written, _) = compare(&arguments);
    assert_eq!(written["rows"].as_array().unwrap().len(), 2);
}

#[test]
fn help_names_the_direction() {
    let output = tonic_rdma(&["compare", "--help"]).output().unwrap();
    let help = String::from_utf8_lossy(&output.stdout);
    for flag in ["--runtime", "--pin", "--allocator", "--defaults", "--at-least", "--direction"] {
        assert!(help.contains(flag), "{flag} in {help}");
    }
}
