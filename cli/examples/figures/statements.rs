//! The sentences of the page on the paper's figures that have values. Each is made from the stored runs, and is
//! left out if they lack what it is about.

use std::collections::BTreeMap;

use tonic_rdma_commands::statistics::range;
use tonic_rdma_commands::{Failure, units};

use crate::page::{Figure, Row, SETTINGS, of_mode, ratio};
use crate::paper::{
    Cells, between, images_with_computing, middle, most_workers, received, speed_ups, time_ratios,
};

/// The longest line.
const WIDTH: usize = 150;

/// From this length on a tensor is large.
const LARGE: f64 = (1 << 20) as f64;

const ZEROCP: &str = "rdma-zerocp";
const GATHER: &str = "grpc-native-gather";

/// Returns the sentences, as a list.
pub(crate) fn statements(figures: &BTreeMap<String, Figure>) -> Result<String, Failure> {
    let cells = |name: &str| match figures.get(name) {
        Some(figure) => figure.cells(),
        None => Ok(Vec::new()),
    };
    let (transfers, batches, workers) = (cells("paper-8")?, cells("paper-9")?, cells("paper-11")?);
    let found = [
        rpc_or_not(&transfers, &batches),
        windows(&batches),
        copies_of_small_tensors(&transfers),
        placements(&transfers),
        noise(&batches),
        settings(&workers),
        shared_cores(&workers),
        reducers(&cells("paper-baidu")?),
        images(&cells("paper-ar-grpc")?),
    ];
    Ok(found.into_iter().flatten().map(|text| wrapped(&format!("- {text}"))).collect())
}

/// Breaks a paragraph into lines.
fn wrapped(text: &str) -> String {
    let (mut lines, mut length) = (String::new(), 0);
    for word in text.split(' ') {
        let room = word.chars().count() + 1;
        if length > 0 && length + room > WIDTH {
            lines.push_str("\n ");
            length = 1;
        }
        if length > 0 {
            lines.push(' ');
        }
        lines.push_str(word);
        length += room;
    }
    lines + "\n"
}

/// Says how near a ratio is to one.
fn compared(ratio: f64) -> &'static str {
    match ratio {
        ..0.85 => "slower than",
        ..0.95 => "nearly as fast as",
        ..1.1 => "as fast as",
        _ => "faster than",
    }
}

/// The ratios of two modes over some cells, and their median.
fn over(cells: &[&Vec<Row<'_>>], ratios: fn(&[Row<'_>], &str, &str) -> Vec<f64>) -> Option<(String, f64)> {
    let medians: Vec<f64> = cells.iter().filter_map(|cell| middle(&ratios(cell, GATHER, ZEROCP))).collect();
    Some((between(&medians), middle(&medians)?))
}

/// The paper's thesis is that RPC is the wrong abstraction.
fn rpc_or_not(of_tensors: &Cells<'_>, of_models: &Cells<'_>) -> Option<String> {
    let (large, small): (Vec<_>, Vec<_>) = of_tensors
        .iter()
        .filter(|cell| cell[0].number("inflight") == Some(1.0))
        .partition(|cell| cell[0].number("bytes") >= Some(LARGE));
    let (large, median) = over(&large, time_ratios)?;
    let (small, _) = over(&small, time_ratios)?;
    let (all, of_all) = over(&of_models.iter().collect::<Vec<_>>(), speed_ups)?;
    Some(format!(
        "**Is RPC the wrong abstraction?** The paper says so. `{GATHER}` is an RPC, a native call that sends its payload by \
         reference from registered memory. Its speed divided by that of `{ZEROCP}`, which has no calls (figures 8 and 9): \
         {large} (median {}) with one tensor of 1 MiB or more, {small} with smaller ones, and {all} (median {}) with the \
         mini-batches of whole models. So with large tensors this RPC is {} tensors without calls, and with whole models it is \
         {} them. The time of HTTP/2 and of gRPC's copies is no cost of RPC itself. Small tensors do pay for a call.",
        ratio(median),
        ratio(of_all),
        compared(median),
        compared(of_all),
    ))
}

/// Returns the least and the largest median speed-up over some cells.
fn medians<'a, 'b: 'a>(
    cells: impl IntoIterator<Item = &'a Vec<Row<'b>>>,
    over: &str,
    under: &str,
) -> Option<String> {
    let found = cells.into_iter().filter_map(|cell| middle(&speed_ups(cell, over, under)));
    let found: Vec<f64> = found.collect();
    (!found.is_empty()).then(|| between(&found))
}

/// What tuned windows of HTTP/2 change, in figure 9.
fn windows(cells: &Cells<'_>) -> Option<String> {
    let medians = |over: &str, under: &str| medians(cells, over, under);
    let tuned = |mode: &str| medians(&format!("{mode}-tuned"), mode);
    Some(format!(
        "**HTTP/2 windows.** gRPC's modes have tonic's default windows, and those of `--http2 tuned` where a column or a line \
         says `-tuned`. In figure 9 tuned windows make `grpc-tcp` {} times as fast, and `grpc-rdma` {} times. `{ZEROCP}` is {} \
         times as fast as `grpc-tcp` and {} times as fast as `grpc-tcp-tuned`.",
        tuned("grpc-tcp")?,
        tuned("grpc-rdma")?,
        medians(ZEROCP, "grpc-tcp")?,
        medians(ZEROCP, "grpc-tcp-tuned")?,
    ))
}

/// Up to which size `rdma-zerocp` gains nothing.
fn copies_of_small_tensors(cells: &Cells<'_>) -> Option<String> {
    let ratios = cells.iter().filter_map(|cell| {
        let ratio = middle(&time_ratios(cell, ZEROCP, "rdma-cp"))?;
        Some((cell[0].value["bytes"].as_u64()?, ratio))
    });
    let slower: Vec<(u64, f64)> = ratios.take_while(|(_, ratio)| *ratio < 1.0).collect();
    Some(format!(
        "**Copies of small tensors.** Up to {} `{ZEROCP}` × `rdma-cp` is {} in figure 8: there a copy is not what takes the time.",
        units::size(slower.last()?.0),
        between(&slower.iter().map(|(_, ratio)| *ratio).collect::<Vec<_>>()),
    ))
}

/// What dynamic placement and names cost, in figure 8.
fn placements(cells: &Cells<'_>) -> Option<String> {
    let of = |mode: &str, large: bool| {
        let cells = cells.iter().filter(|cell| (cell[0].number("bytes") >= Some(LARGE)) == large);
        let found: Vec<f64> = cells.filter_map(|cell| middle(&time_ratios(cell, ZEROCP, mode))).collect();
        (!found.is_empty()).then(|| between(&found))
    };
    Some(format!(
        "**Static, dynamic, named.** `{ZEROCP}` writes to slots with static placement. With dynamic placement (`rdma-dynamic`, \
         §3.3: metadata by a WRITE, the tensor by a READ) a tensor below 1 MiB takes {} times as long, and a larger one {} \
         times; by name (`rdma-named`, TensorFlow's rendezvous) {} and {} times.",
        of("rdma-dynamic", false)?,
        of("rdma-dynamic", true)?,
        of("rdma-named", false)?,
        of("rdma-named", true)?,
    ))
}

/// How far the runs of one cell differ.
fn noise(cells: &Cells<'_>) -> Option<String> {
    let ratios = |cell: &[Row<'_>]| speed_ups(cell, ZEROCP, "grpc-rdma");
    let spread = |cell: &[Row<'_>]| range(&ratios(cell)).map_or(1.0, |[least, most]| most / least);
    let worst = cells.iter().max_by(|one, other| spread(one).total_cmp(&spread(other)))?;
    (spread(worst) > 1.0).then(|| {
        format!(
            "**Noise.** In figure 9 the runs of one cell differ most at {} ({}): `{ZEROCP}` is {} times as fast as `grpc-rdma`. \
             Smaller differences may be chance.",
            worst[0].field("model"),
            worst[0].field("compute"),
            between(&ratios(worst)),
        )
    })
}

/// Figure 11 in both settings.
fn settings(cells: &Cells<'_>) -> Option<String> {
    let of = |setting: &str, model: &str| {
        let (most, _) = most_workers(cells, setting, model)?;
        let local = middle(&of_mode(most, ZEROCP)?.locals())?;
        Some(format!("{} with {} workers of {model}", ratio(local), most[0].field("workers")))
    };
    let of_setting = |(_, setting): (&str, &str)| {
        let found: Vec<String> =
            ["lstm", "inception-v3", "vgg16"].iter().filter_map(|model| of(setting, model)).collect();
        (!found.is_empty()).then(|| format!("\"{setting}\": {}", found.join(", ")))
    };
    let found: Vec<String> = SETTINGS.into_iter().filter_map(of_setting).collect();
    (found.len() == SETTINGS.len()).then(|| {
        format!(
            "**Two settings.** `{ZEROCP}` × local in figure 11 is, in the setting {}. The first scales the computing, and local \
             with it, by the number of workers. The second does not, so that more workers share the machine's memory and cores.",
            found.join("; in the setting ")
        )
    })
}

/// What several workers on one core change, in figure 11.
fn shared_cores(cells: &Cells<'_>) -> Option<String> {
    let (one, several): (Vec<_>, Vec<_>) =
        cells.iter().partition(|cell| cell[0].number("workers") == Some(1.0));
    let both = |cells: &[&Vec<Row<'_>>]| {
        Some([
            medians(cells.iter().copied(), GATHER, ZEROCP)?,
            medians(cells.iter().copied(), "grpc-rdma", "grpc-tcp")?,
            medians(cells.iter().copied(), ZEROCP, "grpc-tcp")?,
        ])
    };
    let ([gather, rdma, zerocp], [gathers, rdmas, zerocps]) = (both(&one)?, both(&several)?);
    Some(format!(
        "**Several workers.** In figure 11 all servers share one core, and all workers the other. With one worker `{GATHER}` × \
         `{ZEROCP}` is {gather}, and with several {gathers}, because a call takes CPU time, which the workers share. `grpc-rdma` × \
         `grpc-tcp` is {rdma}, and with several {rdmas}: below 1 it loses. `{ZEROCP}` × `grpc-tcp` is {zerocp}, and with several \
         {zerocps}."
    ))
}

/// The traffic of Baidu's two algorithms.
fn reducers(cells: &Cells<'_>) -> Option<String> {
    let [naive, ring] = ["naive", "ring"].map(|algorithm| received(cells, algorithm));
    let at =
        |points: &[(f64, f64)], ranks: f64| points.iter().find(|point| point.0 == ranks).map(|point| point.1);
    let most = naive.iter().map(|point| point.0).fold(0.0, f64::max);
    Some(format!(
        "**One reducer or a ring.** With {most} ranks a single reducer receives {} operands and sends as many, and each rank of a \
         ring {}. From 2 ranks to {most} the former grows {} times, and the latter {} times: it stays below 2. The bytes are \
         counted (`--counters`) and exact on any machine.",
        ratio(at(&naive, most)?),
        ratio(at(&ring, most)?),
        ratio(at(&naive, most)? / at(&naive, 2.0)?),
        ratio(at(&ring, most)? / at(&ring, 2.0)?),
    ))
}

/// AR-gRPC's table.
fn images(cells: &Cells<'_>) -> Option<String> {
    let cell = cells.first()?;
    let of = |mode: &str| images_with_computing(cell, mode).map(units::digits);
    Some(format!(
        "**ResNet-50, synthetic.** AR-gRPC's table has 91.06 images/s over gRPC and 103.21 with Verbs, of a parameter server and three \
         workers with GPUs. Here no image is processed: a step pulls ResNet-50's variables and pushes as many gradients. If the \
         rest of a step took so long that `grpc-tcp` had {} images/s too, `grpc-rdma` would have {}, `{GATHER}` {} and \
         `{ZEROCP}` {}.",
        of("grpc-tcp")?,
        of("grpc-rdma")?,
        of(GATHER)?,
        of(ZEROCP)?,
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use serde_json::{Value, json};

    use super::*;
    use crate::page::Run;

    fn figure(label: &str, rows: Vec<Value>) -> Figure {
        let run = Run {
            label: label.to_owned(),
            command: "tonic-rdma".to_owned(),
            result: json!({ "rows": rows }),
        };
        let columns = "mode=mode".to_owned();
        Figure { columns, rows: String::new(), date: "2026-01-02".to_owned(), runs: vec![run] }
    }

    fn tensor(mode: &str, bytes: u64, p50: f64) -> Value {
        json!({ "mode": mode, "bytes": bytes, "inflight": 1, "p50_us": p50 })
    }

    fn batch(mode: &str, batch: u64, rates: &[f64]) -> Value {
        json!({ "mode": mode, "model": "vgg16", "workers": 2, "compute": "wait", "compute_ms": 61.8, "batch": batch,
                "minibatches_per_s": rates[0], "minibatches_per_s_runs": rates })
    }

    fn said(figures: Vec<(&str, Figure)>) -> String {
        let figures = figures.into_iter().map(|(name, figure)| (name.to_owned(), figure)).collect();
        statements(&figures).unwrap().replace("\n  ", " ")
    }

    #[test]
    fn an_rpc_is_compared_with_tensors_without_calls() {
        let tensors = |gather: f64| {
            let of = |bytes, factor| [tensor(ZEROCP, bytes, 10.0), tensor(GATHER, bytes, 10.0 * factor)];
            figure("", [of(64, 5.0), of(1 << 20, gather)].concat())
        };
        let models = || figure("", vec![batch(ZEROCP, 32, &[5.0]), batch(GATHER, 32, &[4.5])]);
        let text = said(vec![("paper-8", tensors(1.0)), ("paper-9", models())]);
        for part in [
            "(figures 8 and 9): 1.00 (median 1.00) with one tensor",
            "0.20 with smaller",
            "is as fast as tensors",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(
            text.contains("0.90 (median 0.90)") && text.contains("it is nearly as fast as them"),
            "{text}"
        );
        let text = said(vec![("paper-8", tensors(2.0)), ("paper-9", models())]);
        assert!(text.contains("0.50 (median 0.50)") && text.contains("is slower than tensors"), "{text}");
    }

    #[test]
    fn noise_is_that_of_the_runs_of_one_cell() {
        let of = |number, rates: &[f64]| {
            [batch("grpc-rdma", number, &vec![1.0; rates.len()]), batch(ZEROCP, number, rates)]
        };
        let rows = [of(1, &[2.1, 2.1, 2.1]), of(32, &[2.0, 2.2, 2.1])].concat();
        let text = said(vec![("paper-9", figure("wait", rows))]);
        assert!(text.contains("the runs of one cell") && text.contains("vgg16 (wait)"), "{text}");
        assert!(text.contains("2.00 to 2.20"), "{text}");
        assert_eq!(said(vec![("paper-9", figure("wait", of(1, &[2.1]).to_vec()))]), "");
    }

    #[test]
    fn tuned_windows_are_told_from_default_ones() {
        let modes = [
            ("grpc-tcp", 1.0),
            ("grpc-tcp-tuned", 1.75),
            ("grpc-rdma", 2.0),
            ("grpc-rdma-tuned", 3.0),
            (ZEROCP, 7.0),
        ];
        let rows = modes.map(|(mode, rate)| batch(mode, 32, &[rate])).to_vec();
        let text = said(vec![("paper-9", figure("wait", rows))]);
        assert!(text.contains("`grpc-tcp` 1.75 times as fast, and `grpc-rdma` 1.50 times"), "{text}");
        assert!(
            text.contains("7.00 times as fast as `grpc-tcp` and 4.00 times as fast as `grpc-tcp-tuned`"),
            "{text}"
        );
    }

    #[test]
    fn placements_and_copies_are_compared_by_size() {
        let of = |bytes, [zerocp, cp, dynamic, named]: [f64; 4]| {
            [(ZEROCP, zerocp), ("rdma-cp", cp), ("rdma-dynamic", dynamic), ("rdma-named", named)]
                .map(|(mode, p50)| tensor(mode, bytes, p50))
        };
        let rows = [of(1024, [1.0, 0.9, 4.0, 6.0]), of(1 << 20, [20.0, 30.0, 22.0, 40.0])].concat();
        let text = said(vec![("paper-8", figure("", rows))]);
        assert!(text.contains("Up to 1 KiB `rdma-zerocp` × `rdma-cp` is 0.90 in figure 8"), "{text}");
        assert!(text.contains("below 1 MiB takes 4.00 times as long, and a larger one 1.10 times"), "{text}");
        assert!(text.contains("6.00 and 2.00 times."), "{text}");
    }

    #[test]
    fn several_workers_are_told_from_one() {
        let of = |workers: u64, rates: [f64; 4]| {
            [("grpc-tcp", 0), ("grpc-rdma", 1), (GATHER, 2), (ZEROCP, 3)].map(|(mode, at)| {
                let mut row = batch(mode, 32, &[rates[at]]);
                row["workers"] = workers.into();
                row
            })
        };
        let rows = [of(1, [1.0, 2.0, 3.0, 4.0]), of(4, [1.0, 0.75, 1.0, 2.0])].concat();
        let text = said(vec![("paper-11", figure("", rows))]);
        for part in [
            "is 0.75, and with several 0.50,",
            "is 2.00, and with several 0.75:",
            "is 4.00, and with several 2.00.",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn reducers_and_images_are_there_if_measured() {
        let reducer = |mode: &str, ranks: u64, received: u64| json!({ "mode": mode, "ranks": ranks, "bytes": 100, "received_bytes": received });
        let rows = vec![
            reducer("naive", 2, 100),
            reducer("ring", 2, 100),
            reducer("naive", 8, 700),
            reducer("ring", 8, 175),
        ];
        let rate = |mode: &str, each_second: f64| json!({ "mode": mode, "model": "resnet50", "minibatches_per_s": each_second });
        let steps =
            vec![rate("grpc-tcp", 8.0), rate("grpc-rdma", 16.0), rate(GATHER, 40.0), rate(ZEROCP, 40.0)];
        let text = said(vec![("paper-baidu", figure("", rows)), ("paper-ar-grpc", figure("", steps))]);
        assert!(text.contains("With 8 ranks a single reducer receives 7.00 operands"), "{text}");
        assert!(
            text.contains("each rank of a ring 1.75. From 2 ranks to 8 the former grows 7.00 times"),
            "{text}"
        );
        // 32 / 91.06 s for 32 images, of which 1/8 s are the transfers over TCP.
        assert!(text.contains("`grpc-tcp` had 91.1 images/s too, `grpc-rdma` would have 111"), "{text}");
        assert_eq!(said(vec![]), "");
    }

    #[test]
    fn lines_are_not_too_long() {
        let text = wrapped(&format!("- {}", "word ".repeat(100).trim_end()));
        assert!(text.lines().all(|line| line.len() <= WIDTH) && text.lines().count() == 4, "{text}");
        assert!(text.lines().skip(1).all(|line| line.starts_with("  word")), "{text}");
    }
}
