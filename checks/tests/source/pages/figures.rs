//! Compares the tables of figures on the pages with the files that they are copied from, figures in sentences with the
//! tables, and the texts of pictures with the pictures.

use std::fs;
use std::process::Command;

use tonic_rdma_checks::pages::{self, BOOK, Page};
use tonic_rdma_checks::root;

/// Figures in sentences that no table of the page has: the beginning of the page's name, the figures, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("benchmarks-collectives", "1.05 1.25", "limits of the check of the plans"),
    ("containers", "100 20", "a period of the kernel, and a limit of the code"),
    ("paper", "", "figures of the paper, which has its own tables"),
    ("neighbours", "1.3 2.1 1.0 1.2 0.9 1.5 2.6 0.7 2.7", "extremes of several runs"),
];

#[test]
fn pages_have_the_tables_of_the_files() {
    let checked = Command::new(root().join("docs/book/copy-tables")).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn figures_in_sentences_are_in_tables() {
    let pages = figure_pages();
    let faults: Vec<String> = pages.iter().flat_map(|page| faults(page, &pages)).collect();
    assert!(
        faults.is_empty(),
        "no table on the page, on a page that the paragraph links to, or of `benches/figures NAME` in the paragraph \
         has these:\n{}",
        faults.join("\n")
    );
    for (name, figures, _) in EXCEPTIONS {
        let page = pages.iter().find(|page| page.name().starts_with(name)).expect(name);
        let prose = page.prose();
        for figure in figures.split_whitespace() {
            assert!(prose.contains(figure), "{name} no longer has the exception {figure}");
        }
    }
}

#[test]
fn a_figure_that_is_in_no_table_is_found() {
    let table = "<!-- table: figures/none -->\n| a | b |\n|---|---|\n| 2.38 ms | 1.14 |\n<!-- end -->\n";
    let found = |sentence: &str| {
        let page = Page {
            path: format!("{BOOK}/tuning.md").into(),
            text: format!("{table}\n{sentence}\n\n```sh\n9 ms\n```\n"),
        };
        faults(&page, &[]).len()
    };
    for right in ["It takes 2.4 ms.", "12 % less, so 1.1 times as fast", "in 4 ms", "512 × 8 KiB", "`3.3 ×`"]
    {
        assert_eq!(found(right), usize::from(right == "in 4 ms"), "{right}");
    }
    for (wrong, faults) in [
        ("16 MiB takes 2.1 ms, not 2.5 ms", 2),
        ("1.13, 1.2 and 1.3 times", 3),
        ("3.3 × as fast", 1),
        ("30 % less", 1),
    ] {
        assert_eq!(found(wrong), faults, "{wrong}");
    }
}

#[test]
fn texts_of_charts_name_all_of_the_legend_or_nothing_of_it() {
    let mut seen = 0;
    for page in figure_pages() {
        for (alt, file) in pages::targets(&page.text).into_iter().filter(|(_, file)| file.ends_with(".svg")) {
            seen += 1;
            let picture = fs::read_to_string(root().join(page.path.parent().unwrap()).join(&file)).unwrap();
            let faults = unnamed(&alt, &picture);
            assert!(faults.is_empty(), "{}: the text of {file} lacks {faults:?}", page.path.display());
        }
    }
    assert!(seen > 10, "only {seen} pictures were found: is this check broken?");
    let picture = "<text>\ngrpc-tcp\n</text><text>grpc-native</text><text>10 µs</text>";
    assert_eq!(unnamed("Latency of grpc-tcp", picture), ["grpc-native"]);
    assert_eq!(unnamed("grpc-tcp, grpc-native, grpc-rdma", picture), ["grpc-rdma"]);
    assert_eq!(unnamed("grpc-native beside grpc-tcp", picture), [""; 0]);
}

/// Returns the modes that either the text or the picture's legend names, if the text names modes.
fn unnamed(alt: &str, picture: &str) -> Vec<String> {
    let modes = |text: &str| -> Vec<String> {
        let words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '-');
        let is_mode = |word: &&str| ["grpc-", "rdma-"].iter().any(|prefix| word.starts_with(prefix));
        words.filter(is_mode).map(str::to_owned).collect()
    };
    let (named, drawn) = (modes(alt), modes(picture));
    let lacks = |of: &[String], mode: &&String| !of.contains(mode);
    let differ = drawn
        .iter()
        .filter(|mode| lacks(&named, mode))
        .chain(named.iter().filter(|mode| lacks(&drawn, mode)));
    if named.is_empty() { Vec::new() } else { differ.cloned().collect() }
}

/// README and the book's pages but those of design decisions, whose figures are of the day of the decision.
fn figure_pages() -> Vec<Page> {
    let is_page =
        |page: &Page| page.path.to_str() == Some("README.md") || page.path.parent() == Some(BOOK.as_ref());
    pages::all().into_iter().filter(is_page).collect()
}

/// A number with its decimals, and its unit. A ratio has none.
type Figure = (f64, usize, &'static str);

/// Returns the figures in the sentences of a page that no table has.
fn faults(page: &Page, pages: &[Page]) -> Vec<String> {
    let is_excepted = |figure: &str| {
        EXCEPTIONS.iter().any(|(name, figures, _)| {
            page.name().starts_with(name) && (figures.is_empty() || figures.split(' ').any(|of| of == figure))
        })
    };
    let is_measured = page.text.contains("<!-- end -->");
    let (own, prose) = split(page);
    let mut faults = Vec::new();
    for paragraph in prose.split("\n\n") {
        let mut tables = own.clone();
        for (_, target) in pages::targets(paragraph) {
            let file = target.split('#').next().unwrap().rsplit('/').next().unwrap();
            tables.extend(pages.iter().filter(|page| page.name() == file).map(|page| split(page).0));
        }
        for name in paragraph.split("benches/figures ").skip(1).filter_map(|rest| rest.split('`').next()) {
            tables.extend(fs::read_to_string(root().join(BOOK).join(format!("figures/{name}.md"))));
        }
        let known = figures(&tables, false);
        for (text, figure) in figures(&pages::inline_code(paragraph).1, true) {
            // Times without tables are mostly limits.
            let counts = is_measured || ["", "%"].contains(&figure.2);
            if counts && !is_excepted(&text) && !known.iter().any(|(_, known)| fits(figure, *known)) {
                faults.push(format!("{}: {text} {}", page.path.display(), figure.2));
            }
        }
    }
    faults
}

/// Returns the tables of a page, with all that `copy-tables` writes, and its sentences.
fn split(page: &Page) -> (String, String) {
    let (mut tables, mut rest) = (String::new(), String::new());
    for part in page.text.split("<!-- end -->") {
        let mark = ["<!-- table: ", "<!-- figures: "].iter().find_map(|mark| part.find(mark));
        let (before, table) = part.split_at(mark.unwrap_or(part.len()));
        tables += table;
        rest += before;
    }
    for line in (Page { path: page.path.clone(), text: std::mem::take(&mut rest) }).prose().lines() {
        let part = if line.trim_start().starts_with('|') { &mut tables } else { &mut rest };
        *part += &format!("{line}\n");
    }
    (tables, rest)
}

/// Returns the numbers of a table, or the figures in sentences, which have units: all of "1.3, 1.5 and 2.0 times".
fn figures(text: &str, is_sentence: bool) -> Vec<(String, Figure)> {
    let is_between = |letter: char| letter.is_whitespace() || "|(),;:*".contains(letter);
    let words: Vec<&str> = text.split(is_between).map(|word| word.trim_end_matches('.')).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let number = |word: &str| word.parse::<f64>().ok().filter(|_| word.as_bytes()[0].is_ascii_digit());
    let mut found = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let Some(value) = number(word) else { continue };
        let is_of_list =
            |word: &&&str| is_sentence && (number(word).is_some() || ["to", "and", "or"].contains(*word));
        let mut rest = words[at + 1..].iter().skip_while(is_of_list);
        let (next, then) = (rest.next().copied().unwrap_or_default(), rest.next());
        let unit = match next {
            // "512 × 8 KiB" is a product, and only figures with a fraction are measured.
            "×" | "times"
                if is_sentence
                    && (then.is_some_and(|then| number(then).is_some()) || !word.contains('.')) =>
            {
                continue;
            }
            "%" => "%",
            "µs" => "µs",
            "ms" => "ms",
            "×" | "times" => "",
            _ if is_sentence => continue,
            _ => "",
        };
        let decimals = word.split_once('.').map_or(0, |(_, fraction)| fraction.len());
        found.push(((*word).to_owned(), (value, decimals, unit)));
    }
    found
}

/// Returns whether a figure is a known one, rounded, or the difference of a known ratio to one in percent.
fn fits((value, decimals, unit): Figure, (known, exact, of): Figure) -> bool {
    let half = 0.5 * 0.1f64.powi(i32::try_from(decimals).unwrap()) + 1e-9;
    let near = |of: f64| (value - of).abs() <= half;
    let in_percent = [known, known - 1.0, 1.0 - known, 1.0 - 1.0 / known, 1.0 / known - 1.0];
    unit == of && exact >= decimals && near(known)
        || unit == "%" && of.is_empty() && in_percent.iter().any(|ratio| near(ratio * 100.0))
}
