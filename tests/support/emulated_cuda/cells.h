// The cells of recurrent layers, which torch has as kernels of GPUs only, made of operators.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace emulated {

using at::Tensor;
using Bias = std::optional<Tensor>;

inline Tensor with(const Tensor& tensor, const Bias& bias) {
  return bias && bias->defined() ? tensor + *bias : tensor;
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input,
                                                    const Tensor& from_hidden, const Tensor& cell,
                                                    const Bias& input_bias,
                                                    const Bias& hidden_bias) {
  const auto gates = with(with(from_input + from_hidden, input_bias), hidden_bias).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), now = gates[2].tanh(),
               out = gates[3].sigmoid();
  const Tensor next = forget * cell + in * now;
  return {out * next.tanh(), next, at::cat({in, forget, now, out}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Bias& of_hidden,
                                                             const Bias& of_cell,
                                                             const Tensor& cell, const Tensor& next,
                                                             const Tensor& workspace, bool biased) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &now = gates[2], &out = gates[3];
  const Tensor bent = next.tanh(), none = at::zeros_like(next);
  const Tensor hidden = with(none, of_hidden);
  const Tensor through = with(none, of_cell) + hidden * out * (1 - bent * bent);
  const Tensor gradient =
      at::cat({through * now * in * (1 - in), through * cell * forget * (1 - forget),
               through * in * (1 - now * now), hidden * bent * out * (1 - out)},
              1);
  return {gradient, through * forget, biased ? gradient.sum(0) : Tensor()};
}

inline std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden,
                                           const Tensor& hidden, const Bias& input_bias,
                                           const Bias& hidden_bias) {
  const auto input = with(from_input, input_bias).chunk(3, 1);
  const auto again = with(from_hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (input[0] + again[0]).sigmoid(), update = (input[1] + again[1]).sigmoid();
  const Tensor now = (input[2] + reset * again[2]).tanh();
  return {now + update * (hidden - now), at::cat({reset, update, now, hidden, again[2]}, 1)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient,
                                                                            const Tensor& workspace,
                                                                            bool biased) {
  const auto gates = workspace.chunk(5, 1);
  const Tensor &reset = gates[0], &update = gates[1], &now = gates[2], &hidden = gates[3],
               &again = gates[4];
  const Tensor of_now = gradient * (1 - update) * (1 - now * now);
  const Tensor of_update = gradient * (hidden - now) * update * (1 - update);
  const Tensor of_reset = of_now * again * reset * (1 - reset);
  const Tensor of_input = at::cat({of_reset, of_update, of_now}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_update, of_now * reset}, 1);
  return {of_input, of_hidden, gradient * update, biased ? of_input.sum(0) : Tensor(),
          biased ? of_hidden.sum(0) : Tensor()};
}

}  // namespace emulated
